//! Tests of associations: a service, and simulated hosts connected to it.

mod admission;
mod association_end;
mod authenticating_host;
mod authentication;
mod authentication_attacks;
mod connect_errors;
mod discovery;
mod export_updates;
mod fair_shares;
mod fused_pairs;
mod host_rights;
mod in_place_reads;
mod io_commands;
mod memory_limits;
mod power_loss;
mod preemption;
mod rate_limits;
mod reservation_persistence;
mod resets;
mod secret_rotation;
mod secure_channels;
mod server;
mod sleeping;
mod slow_io;
mod stream_cuts;
mod test_target;
#[cfg(feature = "tls")]
mod tls;
mod write_cache;
mod write_fences;
