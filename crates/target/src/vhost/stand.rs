//! What is there whoever has the disk, and how its queues begin to run.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use base::{Medium, Segment};
use dma::{Adopted, Backing, FilePart, Mapping, Regions};
use reactor::{Directory, ReactorId, Registration, ThreadPlan};
use vhost::features::device;
use vhost::inflight::{Record, stride_bytes};
use vhost::{InflightArea, MemoryChange, Offer, Ring, RingPlace, Start};

use super::disk::Disk;
use super::guest::{File, Running, Session, line};
use super::lane::{Lane, LaneParts};
use super::memory::SLOTS_MAX;
use super::post::{Bell, Post};
use super::slots::{Parts, Slots};
use crate::news::News;

/// What is there whoever has the disk.
pub(super) struct Stand {
    pub(super) disk: Disk,
    pub(super) medium: Arc<dyn Medium>,
    pub(super) queues: u16,
    pub(super) regions: Regions,
    pub(super) reactors: Arc<Directory>,
    pub(super) bell: Arc<Bell>,
    pub(super) told: SyncSender<News>,
    /// How much could not be told.
    pub(super) untold: u64,
}

/// Where what is in flight is kept.
pub(super) struct Inflight {
    area: InflightArea,
    memory: Arc<Adopted>,
}

/// Messages to a lane's thread: there are none.
const MAILBOX: usize = 16;

impl Stand {
    pub(super) fn offer(&self) -> Offer {
        Offer {
            features: self.disk.features(),
            queues: self.queues,
            config: self.config(),
            slots: SLOTS_MAX,
        }
    }

    pub(super) fn config(&self) -> Vec<u8> {
        self.disk.config(self.queues).to_bytes().to_vec()
    }

    /// If nobody listens, nobody wants to know; who listens too slowly is told how much it missed.
    pub(super) fn tell(&mut self, news: News) {
        if self.untold > 0 {
            let text = format!("{} things more than could be told", self.untold);
            if self.told.try_send(News::Trouble(text)).is_ok() {
                self.untold = 0;
            }
        }
        self.untold += u64::from(self.told.try_send(news).is_err());
    }

    /// Has a queue run, on a light thread of its own.
    pub(super) fn start(
        &self,
        session: &mut Session,
        queue: u16,
        start: Start<File>,
    ) -> Result<(), String> {
        let slots = self.slots(session, queue, &start)?;
        let call = session.calls.get(&queue).map(|file| line(file)).transpose()?;
        let post = Arc::new(Post::new(&self.bell));
        let lane = Lane::new(LaneParts {
            backend: self.medium.channel()?,
            slots,
            table: Arc::clone(&session.table),
            kick: start.kick.clone(),
            call,
            post: Arc::clone(&post),
        });
        let lane = lane.map_err(|error| error.to_string())?;
        let woken_by = lane.woken_by().map_err(|error| error.to_string())?;
        let is_done_by_kernel = lane.is_done_by_kernel();
        let registration = Registration::active("queue", woken_by, lane);
        let registration =
            if is_done_by_kernel { registration.sleeps_at_once() } else { registration };
        let plan = ThreadPlan::new(&format!("vhost-user-{queue}"));
        let plan = plan.mailbox(MAILBOX).poller(registration);
        let homes: Vec<ReactorId> = self.reactors.reactors().collect();
        let plan = match homes.get(usize::from(queue) % homes.len().max(1)) {
            Some(home) => plan.on(*home),
            None => plan,
        };
        let thread = self.reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        session.lanes.insert(queue, Running { post, thread, start });
        Ok(())
    }

    fn slots(
        &self,
        session: &Session,
        queue: u16,
        start: &Start<File>,
    ) -> Result<Slots<Regions>, String> {
        let Start { size, base, addresses, features, .. } = *start;
        let memory = self.regions.clone();
        let place = RingPlace::new(session.table.space(), size, addresses);
        let place = place.map_err(|outside| format!("its ring: {outside}"))?;
        let has_event_index = features & device::RING_EVENT_IDX != 0;
        let ring = |next| Ring::new(memory.clone(), place, next, has_event_index);
        let ring = |next| ring(next).map_err(|broken| broken.to_string());
        let (ring, record) = match &session.inflight {
            None => (ring(base)?, None),
            Some(inflight) => {
                let place = inflight.of_queue(queue, size)?;
                let used = ring(base)?.used();
                let opened = Record::open(memory.clone(), place, inflight.area.size, used);
                let (record, again) = opened.map_err(|why| why.to_string())?;
                // All that was taken is used or in flight, so this is what was taken.
                let taken = u16::try_from(again.len()).unwrap_or(u16::MAX);
                (ring(used.wrapping_add(taken))?, Some((record, again)))
            }
        };
        let disk = self.disk.clone();
        let parts = Parts { memory, disk, features, ring, size, record };
        Slots::new(parts).map_err(|broken| format!("what was in flight: {broken}"))
    }

    /// Has the front end's memory be another. If it cannot be, it stays what it was.
    pub(super) fn change_memory(
        &self,
        session: &mut Session,
        change: MemoryChange<File>,
    ) -> Result<(), String> {
        session.table = Arc::new(session.table.changed(change, &self.regions)?);
        Ok(())
    }

    /// Has all queues run again that ran, in the memory that there is now.
    pub(super) fn start_again(&self, session: &mut Session) -> Result<(), String> {
        for (queue, lane) in std::mem::take(&mut session.lanes) {
            let base = lane.post.ended().map_or(lane.start.base, |ended| ended.next);
            let started = self.start(session, queue, Start { base, ..lane.start });
            started.map_err(|why| format!("queue {queue}: {why}"))?;
        }
        Ok(())
    }

    pub(super) fn adopt_inflight(
        &self,
        area: InflightArea,
        file: &OwnedFd,
    ) -> Result<Inflight, String> {
        let part = FilePart { offset: area.file_offset, len_bytes: area.len_bytes };
        let memory = self.regions.adopt(file.as_fd(), part);
        let memory = memory.map_err(|why| format!("memory for what is in flight: {why}"))?;
        Ok(Inflight { area, memory: Arc::new(memory) })
    }
}

impl Inflight {
    /// The part of a queue of so many entries.
    fn of_queue(&self, queue: u16, size: u16) -> Result<Segment, String> {
        let InflightArea { queues, size: size_max, .. } = self.area;
        if queue >= queues || size > size_max {
            return Err(format!(
                "{size} entries, and memory for what is in flight in {queues} queues of {size_max}, \
                 expected room for it"
            ));
        }
        let len_bytes = stride_bytes(size_max);
        let offset = self.memory.offset() + u64::from(queue) * u64::from(len_bytes);
        Ok(Segment { region: self.memory.id(), offset, len_bytes })
    }
}

/// Memory for what is in flight, which the front end keeps.
pub(super) fn make_inflight(queues: u16, size: u16) -> Result<(InflightArea, OwnedFd), String> {
    let needed = stride_bytes(size) as usize * usize::from(queues);
    let mapping = Mapping::new(needed, Backing::Shared).map_err(|why| why.to_string())?;
    let file = mapping.descriptor().ok_or("shared memory has no descriptor")?;
    let file = file.try_clone_to_owned().map_err(|error| error.to_string())?;
    let len_bytes = mapping.len_bytes() as u64;
    Ok((InflightArea { len_bytes, file_offset: 0, queues, size }, file))
}
