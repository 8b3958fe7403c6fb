//! Takes a mirror for a run: before anything is served, the superblocks record which legs it starts
//! with. From then on a leg that is absent is known as stale, whatever it says itself.

use base::Instant;
use dma::Regions;

use super::Leg;
use super::assemble::Assembly;
use super::commit::legs_of;
use super::raw::{self, Raw};
use super::superblock::Superblock;

/// Writes a superblock of a new generation to every leg that is there. A leg in sync that does not
/// take it is stale from then on, and the others record that before this returns.
///
/// # Errors
///
/// If no leg in sync takes one.
pub(super) fn claim(
    regions: &Regions,
    legs: &[Leg],
    assembly: &mut Assembly,
    now: &mut dyn FnMut() -> Instant,
) -> Result<(), String> {
    let room = raw::room(regions)?;
    loop {
        assembly.generation += 1;
        let (mut failed, mut problems) = (0_u8, Vec::new());
        for number in legs_of(assembly.present()) {
            let Some(leg) = assembly.places[usize::from(number)].map(|place| &legs[place]) else {
                continue;
            };
            let superblock = assembly.superblock(number);
            let written = leg.medium.clone().and_then(|medium| {
                Raw::open(regions, &room, &*medium).and_then(|mut raw| raw.write(&superblock, now))
            });
            match written {
                Ok(()) => assembly.is_written(&superblock),
                Err(problem) => {
                    failed |= 1 << number;
                    problems.push(format!("{}: {problem}", leg.name));
                }
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

impl Assembly {
    /// What is to be written to a leg now.
    fn superblock(&mut self, leg: u8) -> Superblock {
        Superblock {
            uuid: self.uuid,
            sequence: self.sequences[usize::from(leg)].draw(),
            generation: self.generation,
            leg,
            legs: self.legs,
            shape: self.shape,
            in_sync: self.in_sync,
            gone: self.gone,
            fresh: self.fresh & !self.in_sync,
            known: self.known,
            dirty: self.dirty.clone(),
        }
    }

    fn is_written(&mut self, superblock: &Superblock) {
        let index = usize::from(superblock.leg);
        self.sequences[index].good = superblock.sequence;
        self.known[index] = superblock.generation;
    }
}
