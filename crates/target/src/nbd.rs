//! The NBD door: a medium, served over Unix sockets and TCP.
//!
//! ```text
//!   Server      a thread that sleeps until somebody connects, and finds each guest a reactor
//!   Guest       a poller: socket → Connection → Backend → Connection → socket
//!   Connection  the protocol without I/O: bytes in, requests out; answers in, bytes out
//! ```
//!
//! A connection has a fixed stretch of memory and a fixed number of requests under way. Whoever
//! wants more waits until there is room again, and one buffer is enough to get on: bytes are taken
//! from the socket only when there is a place for what they ask. Nothing is allocated for a request.

mod address;
mod answer;
mod connection;
mod exchange;
mod export;
mod guest;
mod haggling;
mod inbox;
mod memory;
mod outbox;
mod pool;
mod progress;
mod seat;
mod served;
mod server;
mod survey;

pub mod fuzz;
#[cfg(test)]
mod tests;

pub use address::parse_address;
pub use connection::Connection;
pub use exchange::{About, Done, Question};
pub use export::Export;
pub use memory::MEMORY_BYTES;
pub use pool::{POOL_BYTES, Pool};
pub use seat::{ConnectionPhase, ConnectionSample, News, Reason};
pub use served::{Served, ServedPlan};
pub use server::{Plan, Server};
