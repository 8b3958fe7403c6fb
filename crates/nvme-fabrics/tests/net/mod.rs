//! Our own host and our own target in one thread, over TCP on loopback.

use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Span, Stream, StreamError};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::socket::{SocketStreamFactory, loopback_pair};
use tenmil_nvme_fabrics::{Connector, PendingConnect};
use tenmil_serve::tcp::{Service, TargetConnection};

/// Connects the host to the target: both ends have sockets of their own.
pub(crate) struct LoopbackNet {
    pub(crate) ours: SocketStreamFactory,
    pub(crate) theirs: SocketStreamFactory,
    pub(crate) service: Service,
    pub(crate) connections: Arc<Mutex<Vec<TargetConnection>>>,
    /// Wraps each stream of the target.
    pub(crate) wrap_target_stream: WrapStream,
}

type WrapStream = Box<dyn Fn(Box<dyn Stream>) -> Box<dyn Stream> + Send>;

/// A connection that is made at once.
struct ImmediateConnect(Option<Box<dyn Stream>>);

impl PendingConnect for ImmediateConnect {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        self.0.take().map(Ok)
    }
}

impl LoopbackNet {
    pub(crate) fn new(
        [ours, theirs]: [SocketStreamFactory; 2],
        service: Service,
        connections: &Arc<Mutex<Vec<TargetConnection>>>,
    ) -> Self {
        Self {
            ours,
            theirs,
            service,
            connections: Arc::clone(connections),
            wrap_target_stream: Box::new(|stream| stream),
        }
    }
}

impl Connector for LoopbackNet {
    fn begin_connect(&mut self, now: Instant, _: Instant) -> Box<dyn PendingConnect> {
        let [one, other] = loopback_pair().unwrap();
        let stream = (self.wrap_target_stream)(self.theirs.new_stream(other).unwrap());
        self.connections.lock().unwrap().push(self.service.accept_stream(stream, 1, now).unwrap());
        Box::new(ImmediateConnect(Some(self.ours.new_stream(one).unwrap())))
    }

    fn peer(&self) -> String {
        "the target".into()
    }
}

/// Polls all connections of the target.
pub(crate) fn poll_connections(connections: &Mutex<Vec<TargetConnection>>, now: Instant) {
    connections.lock().unwrap().iter_mut().for_each(|connection| _ = connection.poll_once(now));
}

/// Memory of the host for its lists.
pub(crate) fn host_pool(regions: &RegionTable) -> DevicePool {
    let pool =
        regions.add_mapping(MemoryMapping::new(16 << 20, MemoryBacking::Private).unwrap()).unwrap();
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), pool, DeviceKind::Emulated, store);
    pool.map_on_demand();
    pool
}

/// Polls all connections of the target a moment later, and returns that time.
pub(crate) fn step_connections(
    connections: &Mutex<Vec<TargetConnection>>,
    now: &mut Instant,
) -> Instant {
    *now = now.after(Span::from_us(100));
    poll_connections(connections, *now);
    *now
}
