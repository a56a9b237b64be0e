"""What a person or an automation may ask of a running job's size. Pure."""
