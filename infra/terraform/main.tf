# The long-lived base of a cluster: what outlives every job. Nodes are never in
# this state; the flow launches them with boto3 and finds them by tag.

module "network" {
  source = "./modules/network"

  cluster = var.cluster
  region  = var.region
  zones   = var.zones
  cidr    = var.network_cidr
}

module "storage" {
  source = "./modules/storage"

  cluster        = var.cluster
  subnets        = module.network.subnets
  security_group = module.network.storage_security_group
  file_system_id = var.file_system_id
  expire_objects = var.expire_objects
  force_destroy  = var.emulated
}

module "interruptions" {
  source = "./modules/interruptions"

  cluster = var.cluster
}

module "identity" {
  source = "./modules/identity"

  cluster          = var.cluster
  region           = var.region
  bucket_arn       = module.storage.bucket_arn
  file_system_arn  = module.storage.file_system_arn
  access_point_arn = module.storage.access_point_arn
  repository_arn   = module.nodes.repository_arn
  log_group_arn    = module.nodes.log_group_arn
  queue_arn        = module.interruptions.queue_arn
}

module "nodes" {
  source = "./modules/nodes"

  cluster            = var.cluster
  image_parameter    = var.image_parameter
  root_volume_gib    = var.root_volume_gib
  log_retention_days = var.log_retention_days
  instance_profile   = module.identity.instance_profile
  security_group     = module.network.node_security_group
}
