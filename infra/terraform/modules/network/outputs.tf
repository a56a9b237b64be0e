output "vpc" {
  description = "Id of the VPC."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Subnet id by zone."
  value       = { for zone, subnet in aws_subnet.zone : zone => subnet.id }
}

output "node_security_group" {
  description = "Security group of training nodes."
  value       = aws_security_group.node.id
}

output "etcd_security_group" {
  description = "Security group of the etcd node."
  value       = aws_security_group.etcd.id
}

output "storage_security_group" {
  description = "Security group of the mount targets."
  value       = aws_security_group.storage.id
}
