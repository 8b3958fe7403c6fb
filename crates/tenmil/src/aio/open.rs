//! Devices by name.

use base::{Segment, Span};
use dma::{CommandStore, DeviceKind, DevicePool};
use host::Clock;
use reactor::{Context, Found, Handle, Poller, Registration};

use super::{Buffers, Device};
use crate::emu::{EmuPlan, Emulated};
use crate::perf::options::Techniques;
use crate::{EmuSpec, Refused};

/// Operations that a device has in flight at most.
const DEPTH: u32 = 128;

/// Bytes of buffers for each device.
const BUFFER_BYTES: u32 = 4 << 20;

/// How often a controller is looked after.
const TENDED: Span = Span::from_ms(100);

/// Brings the devices up that `spec` names, and lets them live on `thread`, each as a poller named by
/// its number. They go when the thread ends, or when a controller cannot be saved.
pub fn open(spec: &EmuSpec, thread: &Handle, clock: &Clock) -> Result<Vec<Device>, Refused> {
    let techniques = &Techniques::default();
    let plan = EmuPlan {
        specs: std::slice::from_ref(spec),
        queue_pairs: 1,
        depth: DEPTH.min(spec.depth_max()),
        buffer_bytes: u64::from(BUFFER_BYTES),
        techniques,
        device_cores: &[None],
        gives_way: true,
        interrupts: true,
        seed: 0,
    };
    let mut emulated = Emulated::start(&plan, clock)?;
    let mut devices = Vec::with_capacity(emulated.count());
    for index in 0..emulated.count() {
        let queue = emulated.queue(index, plan.depth, techniques, clock)?;
        let memory = emulated.allocate(index, BUFFER_BYTES);
        let memory =
            memory.ok_or_else(|| Refused::machine(format!("{spec}: no memory for buffers")))?;
        let buffers = Buffers::new(pool(&emulated, memory));
        devices.push(Device::on(thread, &format!("device-{index}"), queue, &buffers)?);
    }
    let tend = Registration::timed("controllers", TENDED, Tend(Some(emulated)));
    let sent = thread.call(move |context| drop(context.add(tend)));
    sent.map_err(|_| Refused::machine(format!("{spec}: its thread takes no messages")))?;
    Ok(devices)
}

/// Hands out a stretch of an SSD's memory in turn.
fn pool(emulated: &Emulated, memory: Segment) -> DevicePool {
    let store = CommandStore::for_device(DeviceKind::Emulated);
    DevicePool::new(emulated.regions().clone(), memory, DeviceKind::Emulated, store)
}

/// Looks after the controllers while their queues are at work.
struct Tend(Option<Emulated>);

impl Poller for Tend {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let Some(emulated) = &mut self.0 else { return Found::Nothing };
        if emulated.look_after(context.now()).is_err() {
            // Without their controllers the queues answer that the path is gone, when they are
            // polled: one more turn has to follow.
            self.0 = None;
            return Found::Work;
        }
        Found::Nothing
    }
}
