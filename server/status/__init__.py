"""The status page: what it shows, and how that reaches whoever looks. Costs nothing while nobody does."""
