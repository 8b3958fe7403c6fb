//! An emulated SSD and its queue runner on the calling thread, stepped explicitly. For instruction
//! counts, where neither side may wait for the other.

use tenmil_base::{CompletionBatch, Dma, Instant, Segment};
use tenmil_dma::{DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::{Clock, EventFdVectors, Notifier, Sleeper};
use tenmil_nvme_controller::transport::{HostBarHandle, NextPoll};
use tenmil_nvme_host::{
    Controller, ControllerOptions, ControllerState, NamespaceQueue, QueuePairOptions, QueueSizes,
};

use super::queue_runner::{QueueRunner, QueueRunnerParts};
use super::verifier::NoVerify;
use crate::perf::perf_options::{FastPathSwitches, PerfOptions, SizeMix};
use crate::perf::workload::{BlockRange, Workload};
use tenmil_base::Error;
use tenmil_devices::emu::{self, EmulatedSsd};
use tenmil_devices::{EmuMedium, EmuSpec};

/// Emulated null SSD with `depth` random reads of 4 KiB in flight.
pub struct SteppedSsd {
    device: EmulatedSsd,
    queue: QueueRunner<NoVerify>,
    workload: Workload,
    clock: Clock,
    now: Instant,
    /// Not dropped before the queue runner: dropping it would revoke the DMA access.
    _controller: Controller<HostBarHandle<Notifier>, DevicePool>,
}

const POOL_BYTES: usize = 8 << 20;
const NSID: u32 = 1;
/// Limit of the steps for an operation that should take only a few.
const STEPS_MAX: usize = 100_000;

impl SteppedSsd {
    /// Starts the SSD and submits the first reads, with data in the pool of its queues.
    pub fn new(depth: u32) -> Result<Self, Error> {
        Self::with_data_region(depth, |_, pool| {
            (0..depth).map_while(|_| pool.allocate(4096)).collect()
        })
    }

    /// Like [`new`](Self::new), with data in another region, as in an application.
    pub fn with_data_elsewhere(depth: u32) -> Result<Self, Error> {
        Self::with_data_region(depth, |regions, pool| {
            let mapping = MemoryMapping::new(depth as usize * 4096, MemoryBacking::Private);
            let memory = mapping.ok().and_then(|mapping| regions.add_mapping(mapping).ok());
            pool.map_on_demand();
            let part = |index| memory?.slice(index * 4096, 4096);
            (0..depth).map_while(part).collect()
        })
    }

    fn with_data_region(
        depth: u32,
        buffers: impl FnOnce(&RegionTable, &DevicePool) -> Vec<Segment>,
    ) -> Result<Self, Error> {
        let clock = Clock::start();
        let refuse =
            |what: &str| Error::remote(format!("an SSD that is stepped by the caller: {what}"));
        let regions = RegionTable::new(2);
        let mapping =
            MemoryMapping::new(POOL_BYTES, MemoryBacking::Private).map_err(Error::environment)?;
        let memory = regions.add_mapping(mapping).map_err(Error::environment)?;
        let store = emu::command_store(&FastPathSwitches::default());
        let pool = DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, store);
        let spec = EmuSpec { block_size: 4096, ..EmuSpec::new(EmuMedium::Null) };
        let medium = tenmil_drivers::NullDevice::new(4096, 1 << 20)
            .map_err(|error| Error::usage(error.to_string()))?;
        let mut now = clock.now();
        let vectors = EventFdVectors::new(0).map_err(|error| refuse(&error.to_string()))?;
        let mut device =
            EmulatedSsd::new(&spec, 0, std::sync::Arc::new(medium), &pool, vectors, now)
                .map_err(|error| refuse(&error.text))?;
        // The waker is never armed: what is counted is the doorbell of a polling device.
        let bell = Sleeper::new().map_err(|error| refuse(&error.to_string()))?.notifier();
        let options = ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let mut controller = Controller::new(device.host_bar(bell), pool.clone(), options)
            .map_err(|error| refuse(&error.to_string()))?;
        let mut step = |controller: &mut Controller<_, _>, device: &mut EmulatedSsd| {
            now = now.after(tenmil_base::Span::from_us(100));
            device.poll(now);
            while controller.poll(now).is_some() {}
            now
        };
        (0..STEPS_MAX)
            .find(|_| {
                step(&mut controller, &mut device);
                controller.state() == ControllerState::Ready
            })
            .ok_or_else(|| refuse("it does not become ready"))?;
        let entries = (depth + 1).next_power_of_two().max(4);
        let perf = PerfOptions { sizes: SizeMix::single_size(4096), ..PerfOptions::default() };
        let techniques = emu::to_driver_options(&perf.techniques);
        let options = QueuePairOptions { depth: entries, vector: None, techniques };
        let created_at = step(&mut controller, &mut device);
        let id = controller
            .create_queue_pair(created_at, options)
            .map_err(|refusal| refuse(&refusal.to_string()))?;
        let pair = (0..STEPS_MAX)
            .find_map(|_| {
                step(&mut controller, &mut device);
                controller.take_queue_pair(id)
            })
            .ok_or_else(|| refuse("its queue pair is not created"))?;
        let limits = controller.identity().map(|identity| identity.limits);
        let view = controller.namespace(NSID).zip(limits);
        let view = view.map(|(namespace, limits)| namespace.view(&limits));
        let view = view.ok_or_else(|| refuse("it has no namespace"))?;
        let mut backend = NamespaceQueue::new(pair, view, QueueSizes::default())
            .ok_or_else(|| Error::environment("no memory is left for lists"))?;
        // Handles the initial event here, so that it is not part of the count.
        tenmil_base::IoChannel::poll(
            &mut backend,
            clock.now(),
            &mut CompletionBatch::with_capacity(1),
        );
        let mut workload = Workload::new(&perf, perf.seed);
        let range = BlockRange { first: 0, count: 1 << 20 };
        let buffers = buffers(&regions, &pool);
        let mut queue = QueueRunner::new(QueueRunnerParts {
            fixed: workload.fixed_operation_and_size(),
            backend: Box::new(backend),
            addresses: workload.new_address_stream(range, 4096),
            scrutiny: NoVerify,
            buffers,
            budget: u64::MAX,
        });
        let now = clock.now();
        queue.start_idle_tasks(now, &mut workload);
        Ok(Self { device, queue, workload, clock, now, _controller: controller })
    }

    /// Polls the device until it is idle.
    pub fn poll_device(&mut self) {
        self.now = self.clock.now();
        while self.device.poll(self.now) == NextPoll::Busy {}
    }

    /// One iteration of the queue runner: reaps completions and submits as many requests. Returns
    /// their number.
    #[inline(never)]
    pub fn poll_queue(&mut self) -> usize {
        self.queue.step_closed_loop(self.now, &self.clock, &mut self.workload).0
    }
}

#[cfg(test)]
mod tests {
    use super::SteppedSsd;

    #[test]
    fn every_io_in_flight_completes_at_each_step() {
        for make in [SteppedSsd::new, SteppedSsd::with_data_elsewhere] {
            for depth in [1, 2, 7, 128] {
                let mut pair = make(depth).unwrap();
                for _ in 0..20 {
                    pair.poll_device();
                    assert_eq!(pair.poll_queue(), depth as usize);
                }
            }
        }
    }
}
