//! Jobs whose memory is lent by the kernel (ublk's zero copy): the ring never has an address of it.
//!
//! ```text
//!   lend: request → place in the ring's table ─▶ read or write by that place ─▶ take it back
//! ```
//!
//! The three are linked so that each waits for the one before, and none is kept back by a failure:
//! what was lent is always taken back. A job has ended when its second and its third entry have. If
//! the kernel takes the entries in two goes, the link between them is lost; their order is not, since
//! it does the first and the third at once, and the second holds what was lent until it is done.

use std::os::fd::{AsRawFd, RawFd};

use base::{NoSuchMemory, Segment};
use io_uring::{opcode, squeue, types};
use rustix::io::Errno;
use wire::ublk::{QueueCommand, QueueOp};

use super::{FILE, Ring, Slot, Verb};
use crate::engine::Refused;

/// What is left of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lent {
    /// Who lends it. Open for as long as the `Regions` in the same slot.
    lender: RawFd,
    queue: u16,
    request: u16,
    /// The next byte of the request, and how many are left.
    byte: u32,
    left: u32,
    /// What the kernel said against lending it.
    refused: Option<Errno>,
    /// What the kernel said of the transfer.
    moved: Option<i32>,
    is_back: bool,
}

/// Which of the three entries of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Lend,
    Move,
    TakeBack,
}

/// Whether the ring has places for what is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Table {
    /// Nobody has needed them.
    Unasked,
    There,
    /// The kernel gives none.
    Refused,
}

/// Entries of a job.
pub(super) const ENTRIES: u32 = 3;
/// Where in the number of an entry its step is.
const STEP_SHIFT: u32 = 16;

impl Step {
    /// The slot and the step that an entry of this number is about.
    pub(super) fn of(number: u64) -> Option<(u16, Self)> {
        let step = match number >> STEP_SHIFT {
            1 => Self::Lend,
            2 => Self::Move,
            3 => Self::TakeBack,
            _ => return None,
        };
        Some(((number & 0xffff) as u16, step))
    }

    fn number(self, index: u16) -> u64 {
        let step = match self {
            Self::Lend => 1,
            Self::Move => 2,
            Self::TakeBack => 3,
        };
        step << STEP_SHIFT | u64::from(index)
    }
}

impl Ring {
    /// Begins a job of which this memory has no address: because it was lent, or because there is
    /// none.
    #[inline(never)]
    pub(super) fn submit_lent(
        &mut self,
        index: u16,
        segments: &[Segment],
        missing: NoSuchMemory,
    ) -> Result<(), Refused> {
        let slot = &mut self.slots[usize::from(index)];
        let refused = Refused::NoSuchMemory(missing);
        let [segment] = segments else { return Err(refused) };
        let lent = slot.vectors.regions().lent(*segment).ok_or(refused)?;
        let lent = Lent {
            lender: lent.descriptor.as_raw_fd(),
            queue: lent.queue,
            request: lent.request,
            byte: lent.byte,
            left: lent.len_bytes,
            refused: None,
            moved: None,
            is_back: false,
        };
        if self.table == Table::Unasked {
            let places = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
            let registered = self.ring.submitter().register_buffers_sparse(places);
            self.table = if registered.is_ok() { Table::There } else { Table::Refused };
        }
        if self.table == Table::Refused {
            return Err(refused);
        }
        self.slots[usize::from(index)].lent = Some(lent);
        self.free.pop();
        if !self.push_lent(index) {
            self.again.push(index);
        }
        Ok(())
    }

    /// Whether there was room for the entries of a job.
    pub(super) fn push_lent(&mut self, index: u16) -> bool {
        let slot = &self.slots[usize::from(index)];
        let (offset, verb) = (slot.offset, slot.verb);
        let Some(lent) = &slot.lent else { return true };
        let entries = lent.entries(index, verb, offset);
        for is_last in [false, true] {
            // SAFETY: the entries name no memory of ours, but a place of the ring's own table; the
            // registered file, which `_file` keeps open; and the lender, which the `Regions` of the
            // slot keep open.
            let pushed = unsafe { self.ring.submission().push_multiple(&entries) };
            if pushed.is_ok() {
                self.unsubmitted += entries.len();
                self.tell_of_a_piece();
                return true;
            }
            if !is_last {
                self.flush();
            }
        }
        false
    }
}

impl Slot {
    /// An entry of a job has ended. `None` while another one has not; else what that makes of the
    /// job, as [`outcome`](Self::outcome) says it.
    #[expect(clippy::option_option, reason = "not ended, halfway, ended")]
    pub(super) fn lent_step(
        &mut self,
        step: Step,
        result: i32,
    ) -> Option<Option<Result<(), Errno>>> {
        let lent = self.lent.as_mut()?;
        match step {
            Step::Lend => lent.refused = Some(Errno::from_raw_os_error(-result.min(-1))),
            Step::Move => lent.moved = Some(result),
            // Whether there was something to be taken back is known from the other two.
            Step::TakeBack => lent.is_back = true,
        }
        let moved = lent.moved.filter(|_| lent.is_back)?;
        let outcome = lent.outcome(moved);
        match outcome {
            None => {
                self.offset += u64::try_from(moved).unwrap_or(0);
                (lent.refused, lent.moved, lent.is_back) = (None, None, false);
            }
            Some(_) => self.lent = None,
        }
        Some(outcome)
    }
}

impl Lent {
    fn entries(&self, index: u16, verb: Verb, offset: u64) -> [squeue::Entry; ENTRIES as usize] {
        let after_it = squeue::Flags::IO_HARDLINK;
        let quiet = squeue::Flags::SKIP_SUCCESS;
        let place = std::ptr::without_provenance_mut::<u8>(self.byte as usize);
        let moves = match verb {
            Verb::Write { stable } => {
                let flags = if stable { libc::RWF_DSYNC } else { 0 };
                let write = opcode::WriteFixed::new(FILE, place, self.left, index);
                write.offset(offset).rw_flags(flags).build()
            }
            _ => opcode::ReadFixed::new(FILE, place, self.left, index).offset(offset).build(),
        };
        [
            self.ask(QueueOp::Lend, index)
                .flags(after_it | quiet)
                .user_data(Step::Lend.number(index)),
            moves.flags(after_it).user_data(Step::Move.number(index)),
            self.ask(QueueOp::TakeBack, index).user_data(Step::TakeBack.number(index)),
        ]
    }

    fn ask(&self, op: QueueOp, index: u16) -> squeue::Entry {
        ask(self.lender, (self.queue, self.request), op, index)
    }

    /// What comes of the job; `None` if some of it is still to be done.
    fn outcome(&mut self, moved: i32) -> Option<Result<(), Errno>> {
        if let Some(refused) = self.refused {
            return Some(Err(refused));
        }
        let Ok(count) = u32::try_from(moved) else {
            let errno = Errno::from_raw_os_error(-moved);
            return (!matches!(errno, Errno::INTR | Errno::AGAIN)).then_some(Err(errno));
        };
        if count == 0 || count > self.left {
            return Some(Err(Errno::IO));
        }
        self.byte += count;
        self.left -= count;
        (self.left == 0).then_some(Ok(()))
    }
}

/// What has `lender` lend a request of a queue to place `index` of a ring, or take it back from there.
pub(crate) fn ask(
    lender: RawFd,
    (queue, tag): (u16, u16),
    op: QueueOp,
    index: u16,
) -> squeue::Entry {
    let command = QueueCommand { queue, tag, result: 0, buffer: index };
    opcode::UringCmd16::new(types::Fd(lender), op.code()).cmd(command.to_bytes()).build()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dma::{Lender, Regions};
    use rustix::io::Errno;

    use super::{Lent, Step, Table};
    use crate::engine::{Capacity, Ended, Job};
    use crate::file::{File, FileOptions};
    use crate::uring::{Ring, Slot, Verb};
    use crate::vectored::Vectors;

    fn slot(verb: Verb) -> Slot {
        let lent = Lent {
            lender: 77,
            queue: 2,
            request: 9,
            byte: 4096,
            left: 8192,
            refused: None,
            moved: None,
            is_back: false,
        };
        let vectors = Vectors::with_capacity(Regions::new(1), 1);
        Slot { token: 0, offset: 1 << 20, verb, vectors, lent: Some(lent) }
    }

    /// The bytes of an entry (io_uring.h: `struct io_uring_sqe`).
    fn bytes(entry: &io_uring::squeue::Entry) -> [u8; 64] {
        assert_eq!(size_of_val(entry), 64);
        // SAFETY: the entry is 64 bytes long and alive, and bytes need no alignment.
        unsafe { (&raw const *entry).cast::<[u8; 64]>().read() }
    }

    fn word(bytes: &[u8; 64], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn long(bytes: &[u8; 64], at: usize) -> u64 {
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn what_is_lent_is_moved_by_its_place_and_taken_back() {
        let (read_fixed, write_fixed, command) = (4, 5, 46);
        let (hard_link, skip_success) = (1 << 3, 1 << 6);
        for (verb, opcode, flags) in [
            (Verb::Read, read_fixed, 0),
            (Verb::Write { stable: false }, write_fixed, 0),
            (Verb::Write { stable: true }, write_fixed, 2),
        ] {
            let lent = slot(verb).lent.unwrap();
            let [lend, moves, back] = lent.entries(5, verb, 1 << 20).map(|entry| bytes(&entry));
            assert_eq!([lend[0], moves[0], back[0]], [command, opcode, command]);
            assert_eq!([lend[1], moves[1], back[1]], [hard_link | skip_success, hard_link | 1, 0]);
            for (entry, op) in [(&lend, 0xc010_7523), (&back, 0xc010_7524)] {
                assert_eq!((word(entry, 4), word(entry, 8)), (77, op));
                let said = "02000900 00000000 05000000 00000000".replace(' ', "");
                let found: String = entry[48..].iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(found, said, "queue, tag, result, place");
            }
            assert_eq!((long(&moves, 8), long(&moves, 16)), (1 << 20, 4096), "offset, byte");
            assert_eq!((word(&moves, 24), word(&moves, 28)), (8192, flags), "length, RWF_DSYNC");
            assert_eq!(moves[40..42], [5, 0], "its place");
            let steps = [lend, moves, back].map(|entry| Step::of(long(&entry, 32)));
            let expected = [Step::Lend, Step::Move, Step::TakeBack].map(|step| Some((5, step)));
            assert_eq!(steps, expected);
        }
    }

    #[test]
    fn numbers_that_are_no_step_are_nothing() {
        for number in [0, 5, 0xffff, 4 << 16, u64::MAX] {
            assert_eq!(Step::of(number), None, "{number:#x}");
        }
    }

    #[test]
    fn a_job_has_ended_when_it_has_moved_and_is_back_whichever_comes_first() {
        for steps in [[Step::Move, Step::TakeBack], [Step::TakeBack, Step::Move]] {
            let mut slot = slot(Verb::Read);
            assert_eq!(slot.lent_step(steps[0], 8192), None);
            assert_eq!(slot.lent_step(steps[1], 8192), Some(Some(Ok(()))));
            assert!(slot.lent.is_none());
            assert_eq!(slot.lent_step(Step::Lend, -5), None, "it is over");
        }
    }

    #[test]
    fn a_transfer_that_stops_halfway_goes_on_where_it_stopped() {
        let mut slot = slot(Verb::Read);
        assert_eq!(slot.lent_step(Step::Move, 512), None);
        assert_eq!(slot.lent_step(Step::TakeBack, 0), Some(None));
        let lent = slot.lent.unwrap();
        assert_eq!((slot.offset, lent.byte, lent.left), ((1 << 20) + 512, 4608, 7680));
        assert_eq!(slot.lent_step(Step::TakeBack, 0), None, "the rest has not moved");
        assert_eq!(slot.lent_step(Step::Move, 7680), Some(Some(Ok(()))));
    }

    #[test]
    fn what_the_kernel_says_against_it_is_told() {
        let outcome = |lend: Option<i32>, moved| {
            let mut slot = slot(Verb::Write { stable: false });
            lend.map(|lend| slot.lent_step(Step::Lend, lend));
            slot.lent_step(Step::Move, moved);
            slot.lent_step(Step::TakeBack, -22).unwrap()
        };
        assert_eq!(
            outcome(Some(-16), -14),
            Some(Err(Errno::BUSY)),
            "the first thing that went wrong"
        );
        assert_eq!(outcome(None, -28), Some(Err(Errno::NOSPC)));
        assert_eq!(outcome(None, 0), Some(Err(Errno::IO)), "no progress is no success");
        assert_eq!(outcome(None, 8193), Some(Err(Errno::IO)), "nor is too much");
        for passing in [-libc::EINTR, -libc::EAGAIN] {
            assert_eq!(outcome(None, passing), None);
        }
    }

    #[test]
    fn who_lends_nothing_is_found_out_and_the_ring_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let options = FileOptions {
            path: directory.path().join("blocks"),
            len_bytes: Some(1 << 20),
            unit_bytes: 512,
            direct: false,
            read_only: false,
        };
        let file = Arc::new(File::open(&options).unwrap());
        let regions = Regions::new(4);
        let memory = regions.allocate(4096).unwrap();
        let descriptor = tempfile::tempfile().unwrap().into();
        let lender = Lender { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let lent = regions.lend(lender, (16, 4096)).unwrap();
        let capacity = Capacity { depth: 16, segments_max: 4 };
        let Ok(mut ring) = Ring::new(file, &regions, capacity) else {
            println!("skipped: io_uring is not allowed here");
            return;
        };
        for _ in 0..3 {
            for token in 0..16_u32 {
                let part = lent.slice(token * 4096, 4096).unwrap();
                let into = if token % 4 == 3 { memory.segment() } else { part };
                ring.submit(u64::from(token), Job::Read { offset: 0, into: &[into] }).unwrap();
            }
            let parts = [lent.slice(0, 512).unwrap(), lent.slice(512, 512).unwrap()];
            let (mut ended, mut turns) = (Vec::<Ended>::new(), 0);
            while ended.len() < 16 {
                ring.flush();
                ring.poll(&mut ended);
                turns += 1;
                assert!(turns < 1_000_000, "{ended:?}");
                std::thread::yield_now();
            }
            ended.sort_by_key(|one| one.token);
            for one in &ended {
                assert_eq!(one.result.is_ok(), one.token % 4 == 3, "{one:?}");
            }
            let several = ring.submit(0, Job::Read { offset: 0, into: &parts });
            assert!(several.is_err(), "{several:?}");
            assert_eq!(ring.table, Table::There);
            assert_eq!(ring.in_flight(), 0);
        }
    }
}
