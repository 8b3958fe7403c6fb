//! Blocking superblock I/O on a leg that is not part of an open mirror.
//!
//! Used when a mirror is opened, created or changed; not on the I/O path.

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, Instant, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{Region, RegionTable};

use super::MirrorLegDevice;
use super::assembly::{LegCandidate, LegReadResult};
use super::mirror_shared::{allocate_memory, superblock_len_bytes};
use tenmil_volume::mirror::{COPIES_AT, MirrorSuperblock, SUPERBLOCK_BYTES};

/// Memory for the superblock of any leg.
pub(super) fn allocate_superblock_memory(regions: &RegionTable) -> Result<Region, Error> {
    allocate_memory(regions, 64 << 10)
}

/// An I/O channel to a leg, and memory for one superblock.
pub(super) struct SuperblockIo<'a> {
    backend: Box<dyn IoChannel>,
    regions: &'a RegionTable,
    memory: Segment,
}

/// Maximum time of one superblock transfer.
const TIME_LIMIT: Span = Span::from_secs(30);

impl<'a> SuperblockIo<'a> {
    /// Opens a channel, with [`allocate_superblock_memory`] as its memory.
    pub(super) fn open(
        regions: &'a RegionTable,
        room: &Region,
        medium: &dyn BlockDevice,
    ) -> Result<Self, Error> {
        let len_bytes = superblock_len_bytes(medium.limits().block_size);
        let memory = room
            .segment()
            .slice(0, len_bytes)
            .ok_or("a superblock is longer than a block")
            .map_err(Error::environment)?;
        Ok(Self { backend: medium.channel()?, regions, memory })
    }

    /// Reads both copies of the superblock.
    pub(super) fn read(&mut self, now: &mut dyn FnMut() -> Instant) -> LegReadResult {
        // An unreadable copy stays zero, which is invalid; the other one decides.
        let mut copies = [[0; SUPERBLOCK_BYTES]; 2];
        let mut problems = Vec::new();
        for (copy, at) in copies.iter_mut().zip(COPIES_AT) {
            if let Err(problem) = self.run(Operation::Read, at, now) {
                problems.push(problem);
                continue;
            }
            let head = self.memory.slice(0, 4096);
            if head.is_none_or(|head| self.regions.load(head, copy).is_err()) {
                return LegReadResult::Missing("its superblock is out of reach".into());
            }
        }
        if problems.len() == copies.len() {
            return LegReadResult::Missing(problems.swap_remove(0).to_string());
        }
        match MirrorSuperblock::newest_of_copies([&copies[0], &copies[1]]) {
            Ok(superblock) => LegReadResult::Leg(Box::new(superblock)),
            Err(none) => LegReadResult::Foreign(none),
        }
    }

    /// Writes one copy durably (FUA).
    pub(super) fn write(
        &mut self,
        superblock: &MirrorSuperblock,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let head = self.memory.slice(0, 4096).unwrap_or_default();
        let filled = self.regions.fill(self.memory, 0);
        filled
            .and_then(|()| self.regions.store(head, &superblock.encode()))
            .map_err(|_| "its superblock is out of reach".to_owned())
            .map_err(Error::environment)?;
        self.run(Operation::Write, COPIES_AT[superblock.copy_index()], now)
    }

    /// Erases both copies.
    pub(super) fn wipe(&mut self, now: &mut dyn FnMut() -> Instant) -> Result<(), Error> {
        let filled = self.regions.fill(self.memory, 0);
        filled
            .map_err(|_| "its superblock is out of reach".to_owned())
            .map_err(Error::environment)?;
        COPIES_AT.iter().try_for_each(|at| self.run(Operation::Write, *at, now))
    }

    fn run(
        &mut self,
        operation: Operation,
        at: u64,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let limits = self.backend.limits();
        let request = Request {
            token: 0,
            lba: at / u64::from(limits.block_size),
            operand: 0,
            segment_first: 0,
            blocks: self.memory.len_bytes / limits.block_size,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: if operation == Operation::Write {
                RequestFlags::FUA
            } else {
                RequestFlags::NONE
            },
        };
        let doing = format!("{} of its superblock", operation.name());
        let until = now().after(TIME_LIMIT);
        let mut completions = CompletionBatch::with_capacity(1);
        let mut taken = false;
        loop {
            let time = now();
            taken = taken || self.backend.submit(time, &[request], &[self.memory]) == 1;
            self.backend.flush_submissions();
            self.backend.poll(time, &mut completions);
            if let [completion] = completions.as_slice() {
                return match completion.status {
                    IoStatus::SUCCESS => Ok(()),
                    status => {
                        Err(Error::environment(format!("{doing}: {status}, expected success")))
                    }
                };
            }
            if time > until {
                return Err(Error::environment(format!(
                    "{doing}: no response within {TIME_LIMIT}"
                )));
            }
            std::hint::spin_loop();
        }
    }
}

/// Reads the superblock of each leg.
pub(super) fn read_leg_candidates(
    regions: &RegionTable,
    legs: &[MirrorLegDevice],
    now: &mut dyn FnMut() -> Instant,
) -> Result<Vec<LegCandidate>, Error> {
    let room = allocate_superblock_memory(regions)?;
    let candidates = legs.iter().map(|leg| {
        let opened =
            leg.medium.clone().and_then(|medium| SuperblockIo::open(regions, &room, &*medium));
        let (found, losses) = match opened {
            Err(why) => (LegReadResult::Missing(why.to_string()), 0),
            Ok(mut raw) => {
                // Counted first: what is lost while the superblock is read is lost by the open mirror.
                let losses = raw.backend.known_write_loss_count();
                (raw.read(now), losses)
            }
        };
        LegCandidate { name: leg.display_name(), found, losses }
    });
    Ok(candidates.collect())
}
