//! A queue between a fake host and a fake block device, in simulated time.

mod abort_and_deletion;
mod fixture;
mod fused;
mod io_commands;
mod rejected_commands;
mod rings;
