"""All alerts, the gravest first."""

from __future__ import annotations

from server.monitoring.scheduler_alerts import SCHEDULER_ALERTS
from server.monitoring.service_alerts import AVAILABILITY_ALERTS, PROCESS_ALERTS, TRAFFIC_ALERTS

ALERTS = (*AVAILABILITY_ALERTS, *SCHEDULER_ALERTS, *TRAFFIC_ALERTS, *PROCESS_ALERTS)
