//! I/O queues of an association: made for a connection, heard of by letters, gone with it.

use std::sync::Arc;

use base::{HostMemory, Instant};
use wire::register::CommandSetSelected;

use super::{FabricsFrontEnd, Order, QueueLink};
use crate::buffers::Buffers;
use crate::controller::contract::{AdminEnd, Origin, Traffic};
use crate::queue::{Letter, Queue, QueueConfig, QueueShared};

/// What an I/O queue is made with.
#[derive(Clone, Copy, Debug)]
pub struct FabricsQueue {
    /// Its identifier: that of the submission and of the completion queue.
    pub qid: u16,
    /// Entries of either ring.
    pub entries: u32,
    /// IOVA of the submission ring.
    pub submission: u64,
    /// IOVA of the completion ring.
    pub completion: u64,
    /// A page of the memory behind it is `1 << page_shift` bytes.
    pub page_shift: u8,
    /// Commands that may be in flight.
    pub in_flight_max: u16,
    /// Of these, commands that need more than one request.
    pub areas: u16,
}

/// The answer to a letter that wants one: for [`Queue::decide`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// As it came in the letter.
    pub ticket: u32,
    /// How the command ends.
    pub end: AdminEnd,
    /// The bytes of a report.
    pub bytes: Vec<u8>,
}

/// Why there is no such I/O queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoQueue {
    /// The controller is not enabled, or not for I/O.
    NotEnabled,
    /// The identifier is none of those that were granted.
    Identifier {
        /// Which.
        qid: u16,
        /// The highest.
        granted: u16,
    },
    /// There is one already.
    Exists {
        /// Which.
        qid: u16,
        /// It is about to go.
        is_ending: bool,
    },
    /// Its rings lie nowhere.
    Memory,
}

/// CC.IOSQES and CC.IOCQES as powers of two (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;
/// Commands taken from a submission queue in a turn, unless the host wants fewer.
const BURST: u32 = 64;

impl FabricsFrontEnd {
    /// Makes an I/O queue for a connection, which owns it and does what its link says.
    ///
    /// # Errors
    ///
    /// [`NoQueue`] says what stands in the way.
    pub fn create_queue<H: HostMemory>(
        &mut self,
        host: H,
        new: &FabricsQueue,
        buffers: Buffers,
    ) -> Result<(Queue<H>, Arc<QueueLink>), NoQueue> {
        self.may_create(new.qid)?;
        let config = QueueConfig {
            cqid: new.qid,
            entries: new.entries,
            address: new.completion,
            page_shift: new.page_shift,
            transfer_bytes_max: self.controller.configuration().transfer_bytes_max,
            in_flight_max: new.in_flight_max,
            areas: new.areas,
            burst: self.burst(),
        };
        let shared = QueueShared {
            doorbells: self.doorbells.clone(),
            floor: self.controller.floor(),
            is_write_through: self.is_write_through.clone(),
            buffers,
        };
        let namespaces = self.controller.namespaces().reader();
        let queue = Queue::new(host, &config, shared, namespaces);
        let mut queue = queue.map_err(|_| NoQueue::Memory)?;
        queue
            .add_submission_queue(new.qid, new.entries, new.submission)
            .map_err(|_| NoQueue::Memory)?;
        self.controller.queue_created();
        let link = Arc::new(QueueLink::default());
        let called = Arc::clone(&link);
        queue.set_bell(Arc::new(move || called.order(Order::Turn)));
        self.links.insert(new.qid, Arc::clone(&link));
        Ok((queue, link))
    }

    /// Whether there may be a queue `qid` now.
    ///
    /// # Errors
    ///
    /// [`NoQueue`] says what stands in the way.
    pub fn may_create(&self, qid: u16) -> Result<(), NoQueue> {
        let (granted, _) = self.controller.queues_granted();
        let cc = &self.configuration;
        let has_entries = cc.iosqes() == SUBMISSION_ENTRY_SHIFT
            && cc.iocqes() == COMPLETION_ENTRY_SHIFT
            && cc.css() != CommandSetSelected::AdminOnly;
        if !self.is_enabled() || !has_entries || self.over.is_some() {
            return Err(NoQueue::NotEnabled);
        }
        if qid == 0 || qid > granted {
            return Err(NoQueue::Identifier { qid, granted });
        }
        if let Some(link) = self.links.get(&qid) {
            return Err(NoQueue::Exists { qid, is_ending: link.is_ending() });
        }
        Ok(())
    }

    /// Takes what queue `qid` has to say. Commands in it are known by the identifiers of the host. A
    /// letter that wants an answer and gets none is answered by [`Order::Decide`].
    pub fn letter(&mut self, now: Instant, qid: u16, letter: Letter) -> Option<Decision> {
        match letter {
            Letter::Error(report) => self.controller.report_error(now, &report),
            Letter::InvalidDoorbell(kind) => self.controller.invalid_doorbell(now, kind),
            Letter::Reservation { ticket, command, mut bytes } => {
                let from = Origin { queue: qid, ticket };
                let end = self.controller.reservation(now, from, &command, &mut bytes);
                self.ring();
                return end.map(|end| Decision { ticket, end, bytes });
            }
            Letter::Trouble(what) => self.trouble = Some(what),
            Letter::Broken(fault) => {
                self.trouble = Some(format!("a ring at {:#x} is not there any more", fault.iova));
            }
        }
        None
    }

    /// The answer to [`Order::Abort`].
    pub fn aborted(&mut self, now: Instant, admin_cid: u16, is_aborted: bool) {
        self.controller.abort_ended();
        self.ended(now, admin_cid, AdminEnd::with(u32::from(!is_aborted)));
        self.ring();
    }

    /// Adds what a queue has done since it last told.
    pub fn add_traffic(&mut self, traffic: &Traffic) {
        self.controller.add_traffic(traffic);
    }

    /// A queue is gone, and nothing that it had begun is under way.
    pub fn queue_gone(&mut self, now: Instant, qid: u16) {
        if let Some(link) = self.links.remove(&qid) {
            self.controller.queue_gone(qid);
            for order in link.take_orders() {
                if let Order::Abort { admin_cid, .. } = order {
                    self.aborted(now, admin_cid, false);
                }
            }
        }
        self.turn_life(now);
        self.ring();
    }

    fn burst(&self) -> u32 {
        self.controller.arbitration().burst.map_or(BURST, u32::from).min(BURST)
    }
}
