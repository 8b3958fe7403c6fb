//! Tests of associations: a service, and simulated hosts connected to it.

mod admission;
mod association_end;
mod connect_errors;
mod discovery;
mod export_updates;
mod fused_pairs;
mod in_place_reads;
mod io_commands;
mod memory_limits;
mod power_loss;
mod preemption;
mod reservation_persistence;
mod resets;
mod server;
mod sleeping;
mod stream_cuts;
mod test_target;
mod write_cache;
mod write_fences;
