//! A remote SSD and its driver, with a network between them that is cut, slow, or silent.

mod bed;
mod bringup;
mod failover;
mod flushes;
mod leased;
mod loss;
mod lost_writes;
mod multipath;
mod notices;
mod one_path;
mod queue_lifecycle;
mod sleeping;
mod stalled_connections;
mod target;
mod turning;
