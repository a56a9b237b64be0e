variable "cluster" {
  description = "Prefix of the names."
  type        = string
}

variable "region" {
  description = "Region, for the name of the S3 endpoint's service."
  type        = string
}

variable "zones" {
  description = "Availability zones, one subnet each."
  type        = list(string)
}

variable "cidr" {
  description = "Address range of the VPC."
  type        = string
}
