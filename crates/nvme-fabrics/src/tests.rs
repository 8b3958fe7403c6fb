//! A remote SSD and its driver, with a network between them that is cut, slow, or silent.

mod authentication;
mod bringup;
mod connection_loss;
mod failover;
mod flushes;
mod kernel_buffers;
mod lost_writes;
mod multipath;
mod one_path;
mod queue_lifecycle;
mod queue_states;
mod simulated_time;
mod single_path_host;
mod socket_like_stream;
mod stalled_connections;
mod target;
mod thread_wakeup;
