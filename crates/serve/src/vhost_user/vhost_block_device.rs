//! State of the disk that outlives its front ends, and the start of virtqueues.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{BlockDevice, Error, Segment};
use tenmil_dma::{FileRange, ForeignRegion, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_reactor::{PollerBuilder, ReactorId, Registry, ThreadBuilder};
use tenmil_vhost_user::features::device;
use tenmil_vhost_user::inflight::{InflightLog, stride_bytes};
use tenmil_vhost_user::{
    BackendConfig, InflightBuffer, MemoryChange, QueueStartParams, Vring, VringAddresses,
};

use super::disk::VirtioDisk;
use super::endpoint::{ClientSession, ReceivedFile, RunningQueue, eventfd_from_file};
use super::guest_memory_table::SLOTS_MAX;
use super::queue_mailbox::{EndpointEvents, QueueMailbox};
use super::request_table::{QueueParts, RequestTable};
use super::virtqueue::{VirtqueueParts, VirtqueuePoller};

/// Disk shared by consecutive front ends.
pub(super) struct VhostBlockDevice {
    pub(super) disk: VirtioDisk,
    pub(super) medium: Arc<dyn BlockDevice>,
    pub(super) queues: u16,
    pub(super) regions: RegionTable,
    pub(super) reactors: Arc<Registry>,
    pub(super) events: Arc<EndpointEvents>,
}

/// Inflight buffer of a front end.
pub(super) struct InflightMemory {
    area: InflightBuffer,
    memory: Arc<ForeignRegion>,
}

/// Mailbox capacity of a virtqueue's light thread; it receives no messages.
const MAILBOX: usize = 16;

impl VhostBlockDevice {
    pub(super) fn backend_config(&self) -> BackendConfig {
        BackendConfig {
            features: self.disk.features(),
            queues: self.queues,
            config: self.config_space(),
            slots: SLOTS_MAX,
        }
    }

    pub(super) fn config_space(&self) -> Vec<u8> {
        self.disk.config_space(self.queues).to_bytes().to_vec()
    }

    /// Starts a virtqueue on a light thread of its own.
    pub(super) fn start_virtqueue(
        &self,
        session: &mut ClientSession,
        queue: u16,
        start: QueueStartParams<ReceivedFile>,
    ) -> Result<(), Error> {
        let slots = self.create_request_table(session, queue, &start)?;
        let call = session.calls.get(&queue).map(|file| eventfd_from_file(file)).transpose()?;
        let mailbox = Arc::new(QueueMailbox::new(&self.events));
        let virtqueue = VirtqueuePoller::new(VirtqueueParts {
            backend: self.medium.channel()?,
            slots,
            table: Arc::clone(&session.table),
            kick: start.kick.clone(),
            call,
            mailbox: Arc::clone(&mailbox),
        });
        let virtqueue = virtqueue.map_err(Error::environment)?;
        let poller_wake = virtqueue.poller_wake().map_err(Error::environment)?;
        let is_done_by_kernel = virtqueue.does_kernel_deliver_completions();
        let registration = PollerBuilder::polled_each_iteration("queue", poller_wake, virtqueue);
        let registration = if is_done_by_kernel { registration.no_spin() } else { registration };
        let builder = ThreadBuilder::new(&format!("vhost-user-{queue}"));
        let builder = builder.mailbox_size(MAILBOX).add_poller(registration);
        let homes: Vec<ReactorId> = self.reactors.reactors().collect();
        let builder = match homes.get(usize::from(queue) % homes.len().max(1)) {
            Some(home) => builder.on_reactor(*home),
            None => builder,
        };
        let thread = self.reactors.spawn(builder).map_err(Error::environment)?;
        mailbox.commands.set_waker(Arc::new(move || thread.notify_reactor()));
        session.queues.insert(queue, RunningQueue { mailbox, start });
        Ok(())
    }

    fn create_request_table(
        &self,
        session: &ClientSession,
        queue: u16,
        start: &QueueStartParams<ReceivedFile>,
    ) -> Result<RequestTable<RegionTable>, Error> {
        let QueueStartParams { size, base, addresses, features, .. } = *start;
        let memory = self.regions.clone();
        let place = VringAddresses::new(session.table.guest_memory(), size, addresses);
        let place =
            place.map_err(|outside| format!("its ring: {outside}")).map_err(Error::environment)?;
        let has_event_index = features & device::RING_EVENT_IDX != 0;
        let ring = |next| Vring::new(memory.clone(), place, next, has_event_index);
        let ring = |next| ring(next).map_err(|broken| broken.to_string());
        let (ring, record) = match &session.inflight {
            None => (ring(base).map_err(Error::environment)?, None),
            Some(inflight) => {
                let place = inflight.segment_of_queue(queue, size)?;
                let used = ring(base).map_err(Error::environment)?.used_index();
                let opened = InflightLog::open(memory.clone(), place, inflight.area.size, used);
                let (record, again) = opened.map_err(Error::environment)?;
                // Every entry taken is either used or in flight, so this is the next available
                // index.
                let taken = u16::try_from(again.len()).unwrap_or(u16::MAX);
                (ring(used.wrapping_add(taken)).map_err(Error::environment)?, Some((record, again)))
            }
        };
        let disk = self.disk.clone();
        let parts = QueueParts { memory, disk, features, ring, size, record };
        RequestTable::new(parts)
            .map_err(|broken| Error::remote(format!("what was in flight: {broken}")))
    }

    /// Replaces the memory of the front end. On failure it stays unchanged.
    pub(super) fn apply_memory_change(
        &self,
        session: &mut ClientSession,
        change: MemoryChange<ReceivedFile>,
    ) -> Result<(), Error> {
        session.table = Arc::new(session.table.with_changes(change, &self.regions)?);
        Ok(())
    }

    /// Restarts all virtqueues that ran, with the current memory.
    pub(super) fn restart_virtqueues(&self, session: &mut ClientSession) -> Result<(), Error> {
        for (queue, virtqueue) in std::mem::take(&mut session.queues) {
            let base =
                virtqueue.mailbox.end_state().map_or(virtqueue.start.base, |ended| ended.next);
            let started =
                self.start_virtqueue(session, queue, QueueStartParams { base, ..virtqueue.start });
            started.map_err(|why| format!("queue {queue}: {why}")).map_err(Error::environment)?;
        }
        Ok(())
    }

    pub(super) fn map_inflight_buffer(
        &self,
        area: InflightBuffer,
        file: &OwnedFd,
    ) -> Result<InflightMemory, Error> {
        let disconnect = FileRange { offset: area.file_offset, len_bytes: area.len_bytes };
        let memory = self.regions.map_foreign(file.as_fd(), disconnect);
        let memory = memory
            .map_err(|why| format!("memory for what is in flight: {why}"))
            .map_err(Error::environment)?;
        Ok(InflightMemory { area, memory: Arc::new(memory) })
    }
}

impl InflightMemory {
    /// Part of a queue of this size.
    fn segment_of_queue(&self, queue: u16, size: u16) -> Result<Segment, Error> {
        let InflightBuffer { queues, size: size_max, .. } = self.area;
        if queue >= queues || size > size_max {
            return Err(Error::environment(format!(
                "{size} entries, and memory for what is in flight in {queues} queues of {size_max}, \
                 expected space for it"
            )));
        }
        let len_bytes = stride_bytes(size_max);
        let offset = self.memory.offset() + u64::from(queue) * u64::from(len_bytes);
        Ok(Segment { region: self.memory.id(), offset, len_bytes })
    }
}

/// Creates an inflight buffer for the front end to keep.
pub(super) fn create_inflight_buffer(
    queues: u16,
    size: u16,
) -> Result<(InflightBuffer, OwnedFd), Error> {
    let needed = stride_bytes(size) as usize * usize::from(queues);
    let mapping = MemoryMapping::new(needed, MemoryBacking::Shared).map_err(Error::environment)?;
    let file = mapping
        .descriptor()
        .ok_or("shared memory has no descriptor")
        .map_err(Error::environment)?;
    let file = file.try_clone_to_owned().map_err(Error::environment)?;
    let len_bytes = mapping.len_bytes() as u64;
    Ok((InflightBuffer { len_bytes, file_offset: 0, queues, size }, file))
}
