"""What is told of requests and of the process: log lines and traces."""
