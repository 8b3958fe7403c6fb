//! Tests of a device over a Unix socket, with clients that speak the protocol by hand.

mod rig;
mod slow;

mod ends;
mod exchange;
mod interop;
mod latency;
mod memory;
