//! Jobs on kernel-owned memory (ublk zero copy): this process has no address of the data.
//!
//! ```text
//!   register: request → place in the ring's table ─▶ read or write by that place ─▶ unregister
//! ```
//!
//! The three entries are linked (hard links), so that each waits for the one before and none is
//! skipped after a failure: a registered buffer is always unregistered. A job is complete when its
//! second and third entries are. If the kernel accepts the entries in two batches, the link between
//! them is lost; the order is not, since register and unregister execute at submission, and the
//! transfer holds the buffer until it is done.

use std::os::fd::{AsRawFd, RawFd};

use io_uring::{opcode, squeue, types};
use rustix::io::Errno;
use tenmil_base::{InvalidSegment, Segment};
use tenmil_wire::ublk::{QueueCommand, QueueOp};

use super::ring::{EngineTag, Ring};
use super::{FILE, FileRing, JobKind, JobSlot, JobTable};
use crate::file_engine::SubmitError;

/// Remaining part of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelBufferJob {
    /// Descriptor of the ublk device. Open as long as the regions in the same slot.
    device: RawFd,
    queue: u16,
    request: u16,
    /// Next byte of the request, and the number of bytes left.
    byte: u32,
    left: u32,
    /// Kernel's error for the registration.
    refused: Option<Errno>,
    /// Kernel's result of the transfer.
    moved: Option<i32>,
    is_unregistered: bool,
}

/// One of the three linked entries of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkedStep {
    Register,
    Transfer,
    Unregister,
}

/// State of the ring's buffer table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferTable {
    /// Not created, because not needed yet.
    Unasked,
    There,
    /// Refused by the kernel.
    Refused,
}

/// Entries per job.
pub(super) const ENTRIES: u32 = 3;
/// Bit position of the step in `user_data`.
const STEP_SHIFT: u32 = 16;

impl LinkedStep {
    /// Decodes slot and step from `user_data`.
    pub(super) fn from_user_data(number: u32) -> Option<(u16, Self)> {
        let step = match number >> STEP_SHIFT {
            1 => Self::Register,
            2 => Self::Transfer,
            3 => Self::Unregister,
            _ => return None,
        };
        Some(((number & 0xffff) as u16, step))
    }

    fn to_user_data(self, index: u16) -> u32 {
        let step = match self {
            Self::Register => 1,
            Self::Transfer => 2,
            Self::Unregister => 3,
        };
        step << STEP_SHIFT | u32::from(index)
    }
}

impl FileRing {
    /// Starts a job on memory that has no address in this process: kernel-owned, or invalid.
    #[inline(never)]
    pub(super) fn submit_kernel_buffer(
        &mut self,
        index: u16,
        segments: &[Segment],
        missing: InvalidSegment,
    ) -> Result<(), SubmitError> {
        let Self { ring, tag, jobs, .. } = self;
        let slot = &mut jobs.slots[usize::from(index)];
        let refused = SubmitError::InvalidSegment(missing);
        // One buffer is registered per job, so it must be the only segment.
        let [segment] = segments else { return Err(refused) };
        let leased = slot.vectors.regions().kernel_buffer(*segment).ok_or(refused)?;
        let leased = KernelBufferJob {
            device: leased.descriptor.as_raw_fd(),
            queue: leased.queue,
            request: leased.request,
            byte: leased.byte,
            left: leased.len_bytes,
            refused: None,
            moved: None,
            is_unregistered: false,
        };
        // The buffer table is registered at the first use; a refusal is remembered.
        if !ring.access(Ring::has_buffer_table) {
            return Err(refused);
        }
        slot.kernel_buffer = Some(leased);
        jobs.free.pop();
        ring.access(|ring| {
            ring.begin_job();
            if !jobs.push_kernel_buffer(ring, *tag, index) {
                jobs.to_resubmit.push(index);
            }
        });
        Ok(())
    }
}

impl JobTable {
    /// Pushes the entries of a job; false if the ring is full.
    pub(super) fn push_kernel_buffer(
        &mut self,
        ring: &mut Ring,
        tag: EngineTag,
        index: u16,
    ) -> bool {
        let slot = &self.slots[usize::from(index)];
        let Some(leased) = &slot.kernel_buffer else { return true };
        let place = ring.buffer_place(tag, index);
        let entries = leased.linked_entries((tag, index, place), slot.kind, slot.offset);
        // SAFETY: the entries name no memory of this process, but a place in the ring's own table;
        // the registered file, which `_file` keeps open; and the ublk device, which the slot's
        // regions keep open.
        unsafe { ring.push(&entries) }
    }
}

impl JobSlot {
    /// Handles the completion of one entry. `None` while another one is outstanding; else the
    /// result of the job, as [`handle_cqe_result`](Self::handle_cqe_result) returns it.
    #[expect(clippy::option_option, reason = "not ended, halfway, ended")]
    pub(super) fn handle_linked_step(
        &mut self,
        step: LinkedStep,
        result: i32,
    ) -> Option<Option<Result<(), Errno>>> {
        let leased = self.kernel_buffer.as_mut()?;
        match step {
            LinkedStep::Register => {
                leased.refused = Some(Errno::from_raw_os_error(-result.min(-1)))
            }
            LinkedStep::Transfer => leased.moved = Some(result),
            // The other two results show whether a buffer had been registered.
            LinkedStep::Unregister => leased.is_unregistered = true,
        }
        let moved = leased.moved.filter(|_| leased.is_unregistered)?;
        let result_of = leased.result_of(moved);
        match result_of {
            None => {
                self.offset += u64::try_from(moved).unwrap_or(0);
                (leased.refused, leased.moved, leased.is_unregistered) = (None, None, false);
            }
            Some(_) => self.kernel_buffer = None,
        }
        Some(result_of)
    }
}

impl KernelBufferJob {
    fn linked_entries(
        &self,
        (tag, index, buffer): (EngineTag, u16, u16),
        verb: JobKind,
        offset: u64,
    ) -> [squeue::Entry; ENTRIES as usize] {
        let file = tag.file(FILE);
        let user_data = |step: LinkedStep| tag.user_data(step.to_user_data(index));
        // A hard link executes the next entry even after a failure; SKIP_SUCCESS suppresses the
        // completion of a successful registration.
        let after_it = squeue::Flags::IO_HARDLINK;
        let quiet = squeue::Flags::SKIP_SUCCESS;
        // Addresses in a registered ublk buffer are offsets from zero.
        let place = std::ptr::without_provenance_mut::<u8>(self.byte as usize);
        let moves = match verb {
            JobKind::Write { stable } => {
                let flags = if stable { libc::RWF_DSYNC } else { 0 };
                let write = opcode::WriteFixed::new(file, place, self.left, buffer);
                write.offset(offset).rw_flags(flags).build()
            }
            _ => opcode::ReadFixed::new(file, place, self.left, buffer).offset(offset).build(),
        };
        [
            self.buffer_entry(QueueOp::RegisterBuffer, buffer)
                .flags(after_it | quiet)
                .user_data(user_data(LinkedStep::Register)),
            moves.flags(after_it).user_data(user_data(LinkedStep::Transfer)),
            self.buffer_entry(QueueOp::UnregisterBuffer, buffer)
                .user_data(user_data(LinkedStep::Unregister)),
        ]
    }

    fn buffer_entry(&self, op: QueueOp, index: u16) -> squeue::Entry {
        buffer_entry(self.device, (self.queue, self.request), op, index)
    }

    /// Result of the job; `None` if part of it remains.
    fn result_of(&mut self, moved: i32) -> Option<Result<(), Errno>> {
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

/// Entry that registers a request of a ublk queue at place `index` of a ring, or unregisters it.
pub(crate) fn buffer_entry(
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

    use rustix::io::Errno;
    use tenmil_dma::{KernelBufferSource, RegionTable};

    use super::super::ring::EngineTag;
    use super::{BufferTable, KernelBufferJob, LinkedStep};
    use crate::file_engine::{EngineLimits, FileOp, JobCompletion};
    use crate::io_vectors::IoVectors;
    use crate::storage_file::{FileOptions, StorageFile};
    use crate::uring_engine::{FileRing, JobKind, JobSlot};

    fn test_slot(verb: JobKind) -> JobSlot {
        let leased = KernelBufferJob {
            device: 77,
            queue: 2,
            request: 9,
            byte: 4096,
            left: 8192,
            refused: None,
            moved: None,
            is_unregistered: false,
        };
        let vectors = IoVectors::with_capacity(RegionTable::new(1), 1);
        JobSlot { token: 0, offset: 1 << 20, kind: verb, vectors, kernel_buffer: Some(leased) }
    }

    /// Bytes of an entry (io_uring.h: `struct io_uring_sqe`).
    fn entry_bytes(entry: &io_uring::squeue::Entry) -> [u8; 64] {
        assert_eq!(size_of_val(entry), 64);
        // SAFETY: the entry is 64 bytes long and alive, and bytes need no alignment.
        unsafe { (&raw const *entry).cast::<[u8; 64]>().read() }
    }

    fn entry_u32(bytes: &[u8; 64], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn entry_u64(bytes: &[u8; 64], at: usize) -> u64 {
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn kernel_buffer_job_registers_transfers_and_unregisters() {
        let (read_fixed, write_fixed, command) = (4, 5, 46);
        let (hard_link, skip_success) = (1 << 3, 1 << 6);
        for (verb, opcode, flags) in [
            (JobKind::Read, read_fixed, 0),
            (JobKind::Write { stable: false }, write_fixed, 0),
            (JobKind::Write { stable: true }, write_fixed, 2),
        ] {
            let leased = test_slot(verb).kernel_buffer.unwrap();
            let tag = EngineTag { number: 3, lap: 2 };
            let [register, moves, back] = leased
                .linked_entries((tag, 5, 773), verb, 1 << 20)
                .map(|entry| entry_bytes(&entry));
            assert_eq!([register[0], moves[0], back[0]], [command, opcode, command]);
            assert_eq!(
                [register[1], moves[1], back[1]],
                [hard_link | skip_success, hard_link | 1, 0]
            );
            for (entry, op) in [(&register, 0xc010_7523), (&back, 0xc010_7524)] {
                assert_eq!((entry_u32(entry, 4), entry_u32(entry, 8)), (77, op));
                let said = "02000900 00000000 05030000 00000000".replace(' ', "");
                let found: String = entry[48..].iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(found, said, "queue, tag, result, place");
            }
            assert_eq!(
                (entry_u64(&moves, 8), entry_u64(&moves, 16)),
                (1 << 20, 4096),
                "offset, byte"
            );
            assert_eq!(
                (entry_u32(&moves, 24), entry_u32(&moves, 28)),
                (8192, flags),
                "length, RWF_DSYNC"
            );
            assert_eq!(moves[40..42], [5, 3], "its place");
            assert_eq!(entry_u32(&moves, 4), 6, "the first file of the fourth engine");
            let tags = [register, moves, back].map(|entry| entry_u32(&entry, 36));
            assert_eq!(tags, [2 << 16 | 3; 3]);
            let steps = [register, moves, back]
                .map(|entry| LinkedStep::from_user_data(entry_u32(&entry, 32)));
            let expected = [LinkedStep::Register, LinkedStep::Transfer, LinkedStep::Unregister]
                .map(|step| Some((5, step)));
            assert_eq!(steps, expected);
        }
    }

    #[test]
    fn invalid_user_data_is_no_step() {
        for number in [0, 5, 0xffff, 4 << 16, u32::MAX] {
            assert_eq!(LinkedStep::from_user_data(number), None, "{number:#x}");
        }
    }

    #[test]
    fn job_ends_after_transfer_and_unregister_in_any_order() {
        for steps in [
            [LinkedStep::Transfer, LinkedStep::Unregister],
            [LinkedStep::Unregister, LinkedStep::Transfer],
        ] {
            let mut slot = test_slot(JobKind::Read);
            assert_eq!(slot.handle_linked_step(steps[0], 8192), None);
            assert_eq!(slot.handle_linked_step(steps[1], 8192), Some(Some(Ok(()))));
            assert!(slot.kernel_buffer.is_none());
            assert_eq!(slot.handle_linked_step(LinkedStep::Register, -5), None, "it is over");
        }
    }

    #[test]
    fn partial_kernel_buffer_transfer_continues() {
        let mut slot = test_slot(JobKind::Read);
        assert_eq!(slot.handle_linked_step(LinkedStep::Transfer, 512), None);
        assert_eq!(slot.handle_linked_step(LinkedStep::Unregister, 0), Some(None));
        let leased = slot.kernel_buffer.unwrap();
        assert_eq!((slot.offset, leased.byte, leased.left), ((1 << 20) + 512, 4608, 7680));
        assert_eq!(
            slot.handle_linked_step(LinkedStep::Unregister, 0),
            None,
            "the rest has not moved"
        );
        assert_eq!(slot.handle_linked_step(LinkedStep::Transfer, 7680), Some(Some(Ok(()))));
    }

    #[test]
    fn kernel_error_of_any_step_is_reported() {
        let result_of = |register: Option<i32>, moved| {
            let mut slot = test_slot(JobKind::Write { stable: false });
            register.map(|register| slot.handle_linked_step(LinkedStep::Register, register));
            slot.handle_linked_step(LinkedStep::Transfer, moved);
            slot.handle_linked_step(LinkedStep::Unregister, -22).unwrap()
        };
        assert_eq!(
            result_of(Some(-16), -14),
            Some(Err(Errno::BUSY)),
            "the first thing that went wrong"
        );
        assert_eq!(result_of(None, -28), Some(Err(Errno::NOSPC)));
        assert_eq!(result_of(None, 0), Some(Err(Errno::IO)), "no progress is no success");
        assert_eq!(result_of(None, 8193), Some(Err(Errno::IO)), "nor is too much");
        for passing in [-libc::EINTR, -libc::EAGAIN] {
            assert_eq!(result_of(None, passing), None);
        }
    }

    #[test]
    fn unregistered_buffer_is_detected_and_the_ring_continues() {
        let directory = tempfile::tempdir().unwrap();
        let options = FileOptions {
            path: directory.path().join("blocks"),
            len_bytes: Some(1 << 20),
            unit_bytes: 512,
            direct: false,
            read_only: false,
        };
        let file = Arc::new(StorageFile::open(&options).unwrap());
        let regions = RegionTable::new(4);
        let memory = regions.allocate_region(4096).unwrap();
        let descriptor = tempfile::tempfile().unwrap().into();
        let lender = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let leased = regions.register_kernel_buffers(lender, (16, 4096)).unwrap();
        let capacity = EngineLimits { depth: 16, segments_max: 4 };
        let Ok(mut ring) = FileRing::new(file, &regions, capacity) else {
            println!("skipped: io_uring is not allowed here");
            return;
        };
        for _ in 0..3 {
            for token in 0..16_u32 {
                let part = leased.slice(token * 4096, 4096).unwrap();
                let into = if token % 4 == 3 { memory.segment() } else { part };
                ring.submit(u64::from(token), FileOp::Read { offset: 0, into: &[into] }).unwrap();
            }
            let parts = [leased.slice(0, 512).unwrap(), leased.slice(512, 512).unwrap()];
            let (mut ended, mut turns) = (Vec::<JobCompletion>::new(), 0);
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
            let several = ring.submit(0, FileOp::Read { offset: 0, into: &parts });
            assert!(several.is_err(), "{several:?}");
            assert_eq!(ring.ring.inspect(|ring| ring.table), BufferTable::There);
            assert_eq!(ring.in_flight(), 0);
        }
    }
}
