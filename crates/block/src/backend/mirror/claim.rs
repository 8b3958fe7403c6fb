//! Takes a mirror for a run: before anything is served, the superblocks record who has it open, and which
//! legs it starts with. From then on a leg that is absent is known as stale, whatever it says itself.

use base::Instant;
use dma::Regions;
use volume::Owner;

use super::Leg;
use super::assemble::{Assembly, Candidate, Found};
use super::commit::legs_of;
use super::fence::{Ownership, TAKEOVER_SEQUENCES};
use super::raw::{self, Raw, look};
use super::superblock::{Said, Superblock, uuid_text};

/// A claim under way.
pub(super) struct Claim<'a> {
    pub(super) regions: &'a Regions,
    pub(super) legs: &'a [Leg],
    /// A former owner may still write: sequence numbers go on far behind its own.
    pub(super) is_forced: bool,
}

impl Claim<'_> {
    /// Makes `owner` the owner, and looks whether it is: two may have begun at once.
    ///
    /// # Errors
    ///
    /// If no leg in sync takes a superblock, or another opener claimed the mirror meanwhile.
    pub(super) fn claim(
        &self,
        assembly: &mut Assembly,
        owner: Owner,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
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

    /// Writes both copies of a superblock of a new generation to every leg that is there. A leg in sync that
    /// does not take it is stale from then on, and the others record that before this returns.
    pub(super) fn record(
        &self,
        assembly: &mut Assembly,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
        let room = raw::room(self.regions)?;
        loop {
            assembly.generation += 1;
            let (mut failed, mut problems) = (0_u8, Vec::new());
            for number in legs_of(assembly.present()) {
                let Some(leg) = assembly.places[usize::from(number)].map(|at| &self.legs[at])
                else {
                    continue;
                };
                let opened = leg.medium.clone();
                let opened = opened.and_then(|medium| Raw::open(self.regions, &room, &*medium));
                let written = opened.and_then(|mut raw| {
                    // Both, so that neither an older format nor a former owner is left in one.
                    (0..2).try_for_each(|_| {
                        let superblock = assembly.superblock(number);
                        raw.write(&superblock, now).map(|()| assembly.is_written(&superblock))
                    })
                });
                if let Err(problem) = written {
                    failed |= 1 << number;
                    problems.push(format!("{}: {problem}", leg.name));
                }
            }
            if failed & assembly.in_sync == 0 {
                assembly.claimed = assembly.in_sync;
                return Ok(());
            }
            if assembly.in_sync & !failed == 0 {
                let problems = problems.join("; ");
                return Err(format!("record which legs are in sync: no leg takes it: {problems}"));
            }
            assembly.in_sync &= !failed;
        }
    }

    /// Looks whether the superblocks are still those that were written.
    fn is_ours(&self, assembly: &Assembly, now: &mut dyn FnMut() -> Instant) -> Result<(), String> {
        for Candidate { name, found } in look(self.regions, self.legs, now)? {
            if let Found::Leg(leg) = found
                && leg.uuid == assembly.uuid
                && leg.owner.id != assembly.owner.id
                && leg.sequence >= assembly.first[usize::from(leg.leg)]
            {
                let by = leg.owner.owner().map_or("somebody".to_owned(), |by| by.to_string());
                let uuid = uuid_text(assembly.uuid);
                return Err(format!(
                    "mirror {uuid}: {by} opened it at the same time, as {name} says, expected nobody"
                ));
            }
        }
        Ok(())
    }
}

impl Assembly {
    /// What is to be written to a leg now.
    fn superblock(&mut self, leg: u8) -> Superblock {
        let sequence = self.sequences[usize::from(leg)].draw();
        let Self { uuid, generation, legs, shape, in_sync, gone, fresh, known, owner, .. } = *self;
        let said = Said {
            uuid,
            generation,
            legs,
            shape,
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
