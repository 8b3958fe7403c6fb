//! Claims a mirror: before it serves I/O, the superblocks record its owner and the legs it starts with.
//! From then on an absent leg is known as stale, regardless of its own superblock.

use tenmil_base::Error;
use tenmil_base::Instant;
use tenmil_dma::RegionTable;
use tenmil_volume::Owner;

use super::Leg;
use super::assemble::{AssembledMirror, LegCandidate, LegProbe};
use super::commit::legs_of;
use super::fence::TAKEOVER_SEQUENCES;
use super::superblock_io::{self, SuperblockIo, read_superblocks};
use tenmil_volume::mirror::Ownership;
use tenmil_volume::mirror::{CommonFields, Superblock, uuid_text};

/// A claim in progress.
pub(super) struct Claim<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) legs: &'a [Leg],
    /// A former owner may still write: sequence numbers skip far ahead of its own.
    pub(super) is_forced: bool,
}

impl Claim<'_> {
    /// Records `owner` as the owner, and verifies it: two processes may have started at the same time.
    ///
    /// # Errors
    ///
    /// If no in-sync leg accepts a superblock, or another process claimed the mirror at the same time.
    pub(super) fn claim(
        &self,
        assembly: &mut AssembledMirror,
        owner: Owner,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let Owner { id, record } = owner;
        assembly.owner = Ownership { id, epoch: assembly.owner.epoch.wrapping_add(1), record };
        for leg in legs_of(assembly.present()) {
            let sequence = &mut assembly.sequences[usize::from(leg)];
            let gap = if self.is_forced { TAKEOVER_SEQUENCES } else { 0 };
            sequence.used = sequence.used.max(sequence.good) + gap;
            assembly.first[usize::from(leg)] = sequence.used + 1;
        }
        self.record(assembly, now)?;
        self.is_ours(assembly, now)
    }

    /// Writes both superblock copies with a new generation to every present leg. An in-sync leg that
    /// rejects it becomes stale, and the others record that before this returns.
    pub(super) fn record(
        &self,
        assembly: &mut AssembledMirror,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let room = superblock_io::room(self.regions)?;
        loop {
            assembly.generation += 1;
            let (mut failed, mut problems) = (0_u8, Vec::new());
            for number in legs_of(assembly.present()) {
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
                        let superblock = assembly.superblock(number);
                        raw.write(&superblock, now).map(|()| assembly.is_written(&superblock))
                    })
                });
                if let Err(problem) = written {
                    failed |= 1 << number;
                    problems.push(format!("{}: {problem}", leg.shown()));
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
    fn is_ours(
        &self,
        assembly: &AssembledMirror,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        for LegCandidate { name, found, .. } in read_superblocks(self.regions, self.legs, now)? {
            if let LegProbe::Leg(leg) = found
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

impl AssembledMirror {
    /// The next superblock of a leg.
    fn superblock(&mut self, leg: u8) -> Superblock {
        let sequence = self.sequences[usize::from(leg)].draw();
        let Self { uuid, generation, legs, geometry, in_sync, gone, fresh, known, owner, .. } =
            *self;
        let said = CommonFields {
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
        said.on(leg, sequence)
    }

    fn is_written(&mut self, superblock: &Superblock) {
        let index = usize::from(superblock.leg);
        self.sequences[index].good = superblock.sequence;
        self.known[index] = superblock.generation;
    }
}
