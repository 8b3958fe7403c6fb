//! Claims a mirror: before it serves I/O, the superblocks record its owner and the legs it starts with.
//! From then on an absent leg is known as stale, regardless of its own superblock.

use tenmil_base::Error;
use tenmil_base::Instant;
use tenmil_dma::RegionTable;
use tenmil_volume::PoolOwner;

use super::MirrorLegDevice;
use super::assembly::{LegCandidate, LegReadResult, MirrorAssembly};
use super::ownership::TAKEOVER_SEQUENCES;
use super::superblock_commit::leg_numbers_in;
use super::superblock_io::{self, SuperblockIo, read_leg_candidates};
use tenmil_volume::mirror::MirrorOwnership;
use tenmil_volume::mirror::{MirrorCommonFields, MirrorSuperblock, uuid_text};

/// A claim in progress.
pub(super) struct OwnershipClaim<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) legs: &'a [MirrorLegDevice],
    /// A former owner may still write: sequence numbers skip far ahead of its own.
    pub(super) is_forced: bool,
}

impl OwnershipClaim<'_> {
    /// Records `owner` as the owner, and verifies it: two processes may have started at the same time.
    ///
    /// # Errors
    ///
    /// If no in-sync leg accepts a superblock, or another process claimed the mirror at the same time.
    pub(super) fn claim_ownership(
        &self,
        assembly: &mut MirrorAssembly,
        owner: PoolOwner,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let PoolOwner { id, record } = owner;
        assembly.owner =
            MirrorOwnership { id, epoch: assembly.owner.epoch.wrapping_add(1), record };
        for leg in leg_numbers_in(assembly.present_mask()) {
            let sequence = &mut assembly.sequences[usize::from(leg)];
            let gap = if self.is_forced { TAKEOVER_SEQUENCES } else { 0 };
            sequence.used = sequence.used.max(sequence.good) + gap;
            assembly.first[usize::from(leg)] = sequence.used + 1;
        }
        self.write_superblocks(assembly, now)?;
        self.verify_ownership(assembly, now)
    }

    /// Writes both superblock copies with a new generation to every present leg. An in-sync leg that
    /// rejects it becomes stale, and the others record that before this returns.
    pub(super) fn write_superblocks(
        &self,
        assembly: &mut MirrorAssembly,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let room = superblock_io::allocate_superblock_memory(self.regions)?;
        loop {
            assembly.generation += 1;
            let (mut failed, mut problems) = (0_u8, Vec::new());
            for number in leg_numbers_in(assembly.present_mask()) {
                let Some(leg) = assembly.places[usize::from(number)].map(|at| &self.legs[at])
                else {
                    continue;
                };
                let opened = leg.medium.clone();
                let opened =
                    opened.and_then(|medium| SuperblockIo::open(self.regions, &room, &*medium));
                let written = opened.and_then(|mut raw| {
                    // Both copies, so that neither an older format nor a former owner remains in one.
                    (0..2).try_for_each(|_| {
                        let superblock = assembly.next_superblock_of_leg(number);
                        raw.write(&superblock, now)
                            .map(|()| assembly.note_superblock_written(&superblock))
                    })
                });
                if let Err(problem) = written {
                    failed |= 1 << number;
                    problems.push(format!("{}: {problem}", leg.display_name()));
                }
            }
            // Done if every in-sync leg has it. Otherwise the failed ones are dropped, and the rest is
            // written again.
            if failed & assembly.in_sync == 0 {
                assembly.claimed = assembly.in_sync;
                return Ok(());
            }
            if assembly.in_sync & !failed == 0 {
                let problems = problems.join("; ");
                return Err(Error::environment(format!(
                    "record which legs are in sync: no leg takes it: {problems}"
                )));
            }
            assembly.in_sync &= !failed;
        }
    }

    /// Verifies that the superblocks are still those of this owner.
    fn verify_ownership(
        &self,
        assembly: &MirrorAssembly,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        for LegCandidate { name, found, .. } in read_leg_candidates(self.regions, self.legs, now)? {
            if let LegReadResult::Leg(leg) = found
                && leg.uuid == assembly.uuid
                && leg.owner.id != assembly.owner.id
                && leg.sequence >= assembly.first[usize::from(leg.leg)]
            {
                let by =
                    leg.owner.owner().map_or("another process".to_owned(), |by| by.to_string());
                let uuid = uuid_text(assembly.uuid);
                return Err(Error::environment(format!(
                    "mirror {uuid}: {by} opened it at the same time, as recorded on {name}, expected one owner"
                )));
            }
        }
        Ok(())
    }
}

impl MirrorAssembly {
    /// The next superblock of a leg.
    fn next_superblock_of_leg(&mut self, leg: u8) -> MirrorSuperblock {
        let sequence = self.sequences[usize::from(leg)].next_for_older_copy();
        let Self { uuid, generation, legs, geometry, in_sync, gone, fresh, known, owner, .. } =
            *self;
        let said = MirrorCommonFields {
            uuid,
            generation,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner,
            dirty: &self.dirty,
        };
        said.superblock_of_leg(leg, sequence)
    }

    fn note_superblock_written(&mut self, superblock: &MirrorSuperblock) {
        let index = usize::from(superblock.leg);
        self.sequences[index].good = superblock.sequence;
        self.known[index] = superblock.generation;
    }
}
