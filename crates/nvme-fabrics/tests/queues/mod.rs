//! A host with one path and its I/O queues.

use tenmil_base::Instant;
use tenmil_dma::DevicePool;
use tenmil_nvme_fabrics::{
    CacheScope, Connector, FabricsChannel, IoPolicy, Multipath, MultipathOptions, Options,
    PathSetup,
};
use tenmil_nvme_host::{ControllerOptions, FastPathOptions, QueuePairOptions, QueueSizes};

/// A multipath of one to namespace 1 over `connector`, whose queues have this depth. It dials once.
pub(crate) fn connect_one_path(
    pool: DevicePool,
    connector: Box<dyn Connector>,
    options: Options,
    (queue_pairs, depth): (u16, u32),
    now: Instant,
) -> Multipath {
    let mut connector = Some(connector);
    let make_connector = Box::new(move || connector.take().unwrap());
    let (vector, techniques) = (None, FastPathOptions::default());
    let options = MultipathOptions {
        options,
        controller: ControllerOptions { queue_pairs, ..ControllerOptions::default() },
        namespace: 1,
        io_policy: IoPolicy::default(),
        cache: CacheScope::default(),
        queue: QueuePairOptions { depth, vector, techniques },
        sizes: QueueSizes::default(),
    };
    Multipath::begin(vec![PathSetup { pool, make_connector }], options, now).unwrap()
}

/// Opens a queue; `turn` runs the target, and returns the time.
pub(crate) fn open_queue(
    multipath: &mut Multipath,
    mut turn: impl FnMut() -> Instant,
) -> FabricsChannel {
    let request = multipath.open_queue();
    loop {
        let _ = multipath.poll(turn());
        if let Some(queue) = multipath.take_queue(request) {
            return queue;
        }
    }
}
