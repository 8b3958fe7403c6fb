//! NBD server: exports block devices over Unix sockets and TCP.
//!
//! ```text
//!   Server      thread that accepts connections and assigns each to a reactor
//!   ExportSet   exports by name, and the listeners that offer them
//!   Session     poller: socket → Connection → Backend → Connection → socket
//!   Connection  protocol without I/O: bytes in, requests out; completions in, bytes out
//! ```
//!
//! A connection has a fixed amount of memory and a fixed number of request slots. When a request
//! needs more than is free, the connection stops reading until something is released. One buffer is
//! enough to make progress: bytes are received only when there is a place for the data they
//! announce. No request allocates memory.

mod buffer_pool;
mod connection;
mod connection_memory;
mod export;
mod export_set;
mod exported_device;
mod listen_address;
mod negotiation;
mod receive_buffer;
mod reply;
mod send_queue;
mod server;
mod session;
mod session_handle;
mod session_stream;
mod slow_io;
mod slow_query;
mod tls_config;
#[cfg(feature = "tls")]
mod tls_prelude;
mod transfer_rate;
mod transmission;

pub mod fuzz;
#[cfg(test)]
mod tests;

pub use buffer_pool::{BufferPool, POOL_BYTES};
pub use connection::Connection;
pub use connection_memory::MEMORY_BYTES;
pub use export::Export;
pub use export_set::ExportSet;
pub use exported_device::{ExportConfig, ExportedDevice};
pub use listen_address::parse_listen_address;
pub use server::{Server, ServerConfig};
pub use session_handle::{
    ConnectionPhase, ConnectionSample, DisconnectReason, ExportEvent, NbdEvent,
};
pub use tenmil_nvme_auth::SecretBytes;
pub use tls_config::{NbdCertificate, NbdPsk, NbdTls};
pub use transmission::{NbdStats, QueryKind, SlowQuery};
