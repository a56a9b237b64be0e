"""Nodes on EC2: Terraform owns the base that outlives jobs, boto3 owns the nodes."""
