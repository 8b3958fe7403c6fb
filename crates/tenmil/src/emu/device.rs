//! The device's side: front ends, and the threads that turn them.

use std::sync::Arc;

use base::{Dma, Instant, Interrupts, Medium};
use ctrl::Buffers;
use ctrl::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use ctrl::front::{FrontEndConfig, HostBar, MemoryFrontEnd, Wait};
use dma::{DevicePool, SharedHostMemory};
use host::{Clock, Thread};

use crate::{EmuSpec, Refused, Uri};

/// One emulated SSD, as its device's thread turns it.
pub(crate) struct EmulatedSsd {
    front: MemoryFrontEnd<SharedHostMemory, Unheard>,
}

/// Vectors of a host that polls.
#[derive(Debug)]
struct Unheard;

impl Interrupts for Unheard {
    fn raise(&mut self, _: u16) {}
}

/// Commands that may need more than one request each, per queue.
const AREAS: u16 = 32;

/// Bounce buffers of an SSD.
const BUFFERS: u32 = 4;
const BUFFER_BYTES: u32 = 64 << 10;

/// Bytes of a pool that the device's side takes for itself.
pub(super) const DEVICE_BYTES: u64 = BUFFERS as u64 * BUFFER_BYTES as u64;

/// Turns between two looks at the clock: a turn takes well under a microsecond.
const TURNS_PER_LOOK: u32 = 16;

impl EmulatedSsd {
    /// SSD number `index` of the run, of the kind that `uri` names.
    pub(crate) fn new(
        uri: &Uri,
        index: usize,
        medium: Arc<dyn Medium>,
        pool: &DevicePool,
        now: Instant,
    ) -> Result<Self, String> {
        let Uri::Emu(EmuSpec { entries, queues, .. }) = uri;
        let namespaces = vec![NamespaceConfig::new(medium)];
        let subsystem =
            Subsystem::new(SubsystemConfig::new(&format!("EMU{index:05}"), namespaces))?;
        let config = ControllerConfig {
            queue_entries_max: *entries,
            io_queues_max: *queues,
            vectors: queues.saturating_add(1),
            ..ControllerConfig::default()
        };
        let controller = subsystem.controller(now, config)?;
        let in_flight_max = u16::try_from(*entries).unwrap_or(u16::MAX);
        let front = FrontEndConfig {
            in_flight_max,
            areas: AREAS.min(in_flight_max),
            burst: u32::from(in_flight_max),
            ..FrontEndConfig::default()
        };
        // Media reach the data of reads and writes where they lie; the buffers are for commands that
        // look at data themselves, such as a compare that the medium does not know.
        let buffers = (0..BUFFERS).map_while(|_| pool.allocate(BUFFER_BYTES)).collect();
        let buffers = Buffers::new(Arc::new(pool.clone()), buffers);
        let host = SharedHostMemory::new(pool);
        Ok(Self { front: MemoryFrontEnd::new(controller, host, Unheard, buffers, front) })
    }

    /// The registers, as the host holds them.
    pub(crate) fn host_bar(&self) -> HostBar {
        HostBar::new(Arc::clone(self.front.bar()), ())
    }

    /// Does a bounded amount of work. True if there was any.
    #[inline]
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        self.front.turn(now) == Wait::Busy
    }
}

/// Starts a thread for each group of SSDs.
pub(super) fn start(
    groups: Vec<Vec<EmulatedSsd>>,
    cores: &[Option<u32>],
    gives_way: bool,
    clock: Clock,
) -> Result<Vec<Thread<()>>, Refused> {
    let start = |(index, group): (usize, Vec<EmulatedSsd>)| {
        let name = format!("device-{index}");
        let core = cores.get(index).copied().flatten();
        Thread::spawn(&name, core, move |stop| turn_all(group, stop, gives_way, &clock))
            .map_err(|error| Refused::machine(format!("start thread {name}: {error}")))
    };
    groups.into_iter().enumerate().map(start).collect()
}

fn turn_all(
    mut group: Vec<EmulatedSsd>,
    stop: &host::thread::Stop,
    gives_way: bool,
    clock: &Clock,
) {
    while !stop.is_stopped() {
        let now = clock.now();
        for _ in 0..TURNS_PER_LOOK {
            let mut is_busy = false;
            for ssd in &mut group {
                is_busy |= ssd.turn(now);
            }
            if !is_busy && gives_way {
                host::thread::give_way();
                break;
            }
        }
    }
}
