output "launch_template" {
  description = "Id of the launch template."
  value       = aws_launch_template.this.id
}

output "repository_url" {
  description = "Where images are pushed to."
  value       = aws_ecr_repository.this.repository_url
}

output "repository_arn" {
  description = "ARN of the image repository."
  value       = aws_ecr_repository.this.arn
}

output "log_group" {
  description = "Name of the log group."
  value       = aws_cloudwatch_log_group.this.name
}

output "log_group_arn" {
  description = "ARN of the log group."
  value       = aws_cloudwatch_log_group.this.arn
}
