"""Where nodes come from: local processes, Docker, AWS. No Prefect in here."""
