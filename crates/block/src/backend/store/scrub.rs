//! All data of a store, read to see whether they can be, and are what was written.

use std::sync::Arc;

use base::Outcome;
use volume::{Answer, Ask, VolumeInfo};

use super::carrier::Carrier;
use super::pace::Pace;
use super::raw::Raw;
use super::send::{Changed, Watch};
use super::{OpenStore, PAGE_BYTES};
use crate::MediumError;

/// What a scrub has seen of a volume.
#[derive(Clone, Debug)]
pub struct Scrubbed {
    /// The volume.
    pub info: VolumeInfo,
    /// Blocks that were read: all that it has but those of what it was made from, which are read
    /// there, and those of its parent, which are another's.
    pub blocks: u64,
    /// What is damaged of them.
    pub bad: Vec<Bad>,
}

/// Blocks that are damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bad {
    /// The first one.
    pub block: u64,
    /// How many follow one another, in the volume and in the store.
    pub blocks: u64,
    /// The block of the store in which the first one lies.
    pub at: u64,
    /// What is wrong.
    pub cause: Cause,
    /// Other volumes and snapshots that have them.
    pub shared_with: Vec<String>,
}

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The device does not give it.
    Unread,
    /// It does not have its checksum.
    Checksum,
    /// What describes it is damaged: a check of the store names it.
    Metadata,
}

/// One scrub.
struct Scrub<'a, 'b> {
    open: &'a Arc<OpenStore>,
    infos: Vec<VolumeInfo>,
    watch: &'a mut Watch<'b>,
    pace: Pace,
    done: u64,
    total: u64,
}

impl OpenStore {
    /// Reads all data of all volumes and snapshots, each block once, while others go on: at most so
    /// many bytes in a second. Where there are checksums, they are compared.
    ///
    /// # Errors
    ///
    /// If the volumes cannot be listed, memory is short, or `watch` says no.
    pub fn scrub(
        self: &Arc<Self>,
        rate: Option<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Scrubbed>, MediumError> {
        let infos = self.list()?;
        let pace = Pace { rate, clock: self.clock };
        let mut scrub = Scrub { open: self, infos, watch, pace, done: 0, total: 0 };
        let infos = scrub.infos.clone();
        let plans: Vec<Plan> = infos.iter().map(|info| scrub.plan(info)).collect();
        scrub.total = plans.iter().map(Plan::blocks).sum();
        infos.iter().zip(plans).map(|(info, plan)| scrub.volume(info, plan)).collect()
    }
}

/// What is to be read of a volume, and from where on that is not known.
struct Plan {
    pieces: Vec<Changed>,
    unknown_from: Option<u64>,
}

impl Plan {
    fn blocks(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.blocks).sum()
    }
}

impl Scrub<'_, '_> {
    /// What a volume has that what it was made from has not.
    fn plan(&self, info: &VolumeInfo) -> Plan {
        let base = self.infos.iter().find(|one| one.id == info.origin);
        let (mut pieces, mut end) = (Vec::new(), 0);
        let whole = self.open.differences(base, info, &mut |piece| {
            end = piece.block + piece.blocks;
            pieces.extend(Some(piece).filter(|piece| piece.is_mapped));
            Ok(())
        });
        Plan { pieces, unknown_from: whole.err().map(|_| end) }
    }

    fn volume(&mut self, info: &VolumeInfo, plan: Plan) -> Result<Scrubbed, MediumError> {
        // Others may write to it meanwhile.
        let read_only = VolumeInfo { is_read_only: true, ..info.clone() };
        let mut carrier = Carrier::open(self.open, &read_only, None)?;
        let blocks = plan.blocks();
        let mut bad = Vec::new();
        for Changed { block, blocks, .. } in plan.pieces {
            let mut at = block;
            while at < block + blocks {
                let left = u32::try_from(block + blocks - at).unwrap_or(u32::MAX);
                let count = left.min(carrier.blocks_max());
                let began = self.open.clock.now();
                if carrier.verify(at, count).is_err() {
                    self.look(info, &mut carrier, (at, count), &mut bad)?;
                }
                at += u64::from(count);
                self.done += u64::from(count);
                let page = u64::from(PAGE_BYTES);
                self.pace.rest(u64::from(count) * page, began);
                if !(self.watch)((self.done * page, self.total * page)) {
                    return Err(self.open.interrupted());
                }
            }
        }
        if let Some(block) = plan.unknown_from {
            let (blocks, cause) = (info.blocks - block.min(info.blocks), Cause::Metadata);
            bad.push(Bad { block, blocks, at: 0, cause, shared_with: Vec::new() });
        }
        Ok(Scrubbed { info: info.clone(), blocks, bad })
    }

    /// Finds out which blocks of some are damaged.
    fn look(
        &self,
        info: &VolumeInfo,
        carrier: &mut Carrier,
        (first, count): (u64, u32),
        bad: &mut Vec<Bad>,
    ) -> Result<(), MediumError> {
        for block in first..first + u64::from(count) {
            if carrier.verify(block, 1).is_ok() {
                continue;
            }
            let place = self.place(info, block);
            // Somebody may have trimmed it meanwhile.
            if place == Ok(None) {
                continue;
            }
            let (at, cause) = match place {
                Ok(Some(at)) => (at, self.cause(at)),
                _ => (0, Cause::Metadata),
            };
            let others = self.infos.iter().filter(|other| other.id != info.id);
            let has_it = |other: &&VolumeInfo| at > 0 && self.place(other, block) == Ok(Some(at));
            let shared_with: Vec<String> =
                others.filter(has_it).map(|other| other.name.clone()).collect();
            match bad.last_mut() {
                Some(last)
                    if last.block + last.blocks == block
                        && (at == 0 || last.at + last.blocks == at)
                        && last.cause == cause
                        && last.shared_with == shared_with =>
                {
                    last.blocks += 1;
                }
                _ => bad.push(Bad { block, blocks: 1, at, cause, shared_with }),
            }
        }
        Ok(())
    }

    /// Where a block of a volume lies; `Err` if nobody can tell.
    fn place(&self, info: &VolumeInfo, block: u64) -> Result<Option<u64>, ()> {
        match self.open.ask(Ask::Extent { volume: info.id, block }) {
            Ok(Answer::Extent { at, .. }) => Ok(at),
            _ => Err(()),
        }
    }

    /// What is wrong with a block of the store, that cannot be read or does not have its checksum.
    fn cause(&self, at: u64) -> Cause {
        let open = self.open;
        let raw = Raw::open(&open.regions, &open.clock, &*open.medium, &open.shape);
        let read = raw.map_err(|_| Outcome::INTERNAL_ERROR);
        match read.and_then(|mut raw| raw.read(at, &mut [0; 4096])) {
            Ok(()) => Cause::Checksum,
            Err(_) => Cause::Unread,
        }
    }
}
