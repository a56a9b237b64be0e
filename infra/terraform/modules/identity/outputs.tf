output "instance_profile" {
  description = "Name of the nodes' instance profile."
  value       = aws_iam_instance_profile.node.name
}

output "controller_policy" {
  description = "ARN of the policy for whoever runs the flow."
  value       = aws_iam_policy.controller.arn
}
