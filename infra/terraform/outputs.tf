output "base" {
  description = "Everything that the flows need to know of the base, read as one object."
  value = {
    cluster                = var.cluster
    region                 = var.region
    vpc                    = module.network.vpc
    subnets                = module.network.subnets
    node_security_group    = module.network.node_security_group
    etcd_security_group    = module.network.etcd_security_group
    storage_security_group = module.network.storage_security_group
    file_system            = module.storage.file_system
    file_system_is_yours   = var.file_system_id != null
    access_point           = module.storage.access_point
    bucket                 = module.storage.bucket
    repository_url         = module.nodes.repository_url
    launch_template        = module.nodes.launch_template
    instance_profile       = module.identity.instance_profile
    controller_policy      = module.identity.controller_policy
    log_group              = module.nodes.log_group
    interruption_queue     = module.interruptions.queue_url
  }
}
