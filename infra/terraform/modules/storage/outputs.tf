output "file_system" {
  description = "Id of the file system."
  value       = local.file_system
}

output "file_system_arn" {
  description = "ARN of the file system."
  value       = local.own ? aws_efs_file_system.this[0].arn : data.aws_efs_file_system.given[0].arn
}

output "access_point" {
  description = "Id of the access point."
  value       = aws_efs_access_point.this.id
}

output "access_point_arn" {
  description = "ARN of the access point."
  value       = aws_efs_access_point.this.arn
}

output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "mount_targets" {
  description = "Mount target id by zone; empty for the user's own file system."
  value       = { for zone, target in aws_efs_mount_target.zone : zone => target.id }
}
