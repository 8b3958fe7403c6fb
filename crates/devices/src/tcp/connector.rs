//! Connector of a path: a TCP connection, or a TLS connection over one.

use tenmil_base::{Instant, Stream, StreamError, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::socket::{self, SocketOptions, SocketStreamFactory};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_nvme_fabrics::{Connector, PendingConnect};

use super::security::DeviceKeys;

/// Connector to `address`, with the security that the keys are for.
pub(super) fn new_connector(
    address: &str,
    regions: &RegionTable,
    options: &SocketOptions,
    keys: &DeviceKeys,
) -> Box<dyn Connector> {
    let plain = TcpConnector::new(address, regions, options);
    #[cfg(feature = "tls")]
    if keys.security().tls != tenmil_nvme_fabrics::SecureChannelMode::Off {
        let below = Box::new(plain);
        return Box::new(super::tls_connector::TlsConnector::new(below, keys.clone(), regions));
    }
    // Without the feature, no keys for TLS exist.
    let _ = keys;
    Box::new(plain)
}

/// Connects to one address.
struct TcpConnector {
    address: String,
    pool: ThreadPool,
    /// Socket factory. Each thread that uses a socket has its own receive buffers.
    sockets: SocketStreamFactory,
}

/// A connection attempt in progress.
struct TcpConnect {
    connect: Option<socket::ConnectOp>,
    /// Why it failed.
    problem: Option<String>,
    sockets: SocketStreamFactory,
}

/// Maximum number of concurrent name resolutions, and of queued ones.
const LOOK_UPS: usize = 1;
const WAITING: usize = 64;

impl TcpConnector {
    fn new(address: &str, regions: &RegionTable, options: &SocketOptions) -> Self {
        let pool = ThreadPool::new(LOOK_UPS, WAITING);
        let sockets = SocketStreamFactory::new(regions.clone(), options.clone());
        Self { address: address.to_owned(), pool, sockets }
    }
}

impl Connector for TcpConnector {
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect> {
        let (connect, problem) =
            match socket::ConnectOp::start(&self.address, &self.pool, now, until) {
                Ok(connect) => (Some(connect), None),
                Err(error) => (None, Some(error.to_string())),
            };
        Box::new(TcpConnect { connect, problem, sockets: self.sockets.with_own_counters() })
    }

    fn peer(&self) -> String {
        format!("tcp://{}", self.address)
    }
}

impl PendingConnect for TcpConnect {
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        if let Some(problem) = self.problem.take() {
            return Some(Err(StreamError(problem)));
        }
        Some(match self.connect.as_mut()?.poll(now)? {
            Ok(socket) => {
                self.sockets.new_stream(socket).map_err(|error| StreamError(error.to_string()))
            }
            Err(error) => Err(StreamError(error.to_string())),
        })
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.connect.as_ref().map_or(WakeSource::None, socket::ConnectOp::wake_source)
    }
}
