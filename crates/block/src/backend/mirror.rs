//! The device that keeps every block on several others.
//!
//! ```text
//!   write ─┬─▶ leg 0     answered when all legs in sync have it
//!          └─▶ leg 1
//!   read ────▶ one of them
//! ```
//!
//! Each leg carries a [superblock] at its start. It says which legs are in sync, and in
//! which regions legs may differ because somebody was writing there.
//!
//! - A region is marked dirty on all legs before its first block is written, and clean again once
//!   nobody has written it for a while and everything is flushed. After a power cut only dirty
//!   regions are copied.
//! - When a leg fails, the others record durably that it is stale before any write is answered that
//!   it does not have. When it comes back it is told that it is stale, gets every write from then on,
//!   then a copy of every region written while it was away, and only then is it in sync.
//! - What two legs say is compared whenever a mirror is opened; legs that contradict each other are
//!   refused.
//!
//! Writes of the same block that are under way at the same time may leave the legs different, one
//! write on each: whoever sends them has to send one after the other, as file systems do.

mod assemble;
pub(crate) mod bits;
mod channel;
mod commit;
mod meta;
mod raw;
mod shared;
pub mod superblock;
mod tend;
mod work;

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::sync::Arc;

use base::{Backend, Blame, Durability, Instant, Limits, Medium, Operation, Span, Support};
use dma::Regions;
use host::machine::Machine;

use self::assemble::{Assembly, Candidate, Found, assemble};
use self::bits::Bits;
use self::channel::MirrorChannel;
use self::meta::Meta;
use self::shared::{Shared, superblock_bytes};
use self::superblock::{LEGS_MAX, Shape, Superblock, uuid_text};
use self::tend::Policy;
use crate::open::{Handle, Opened, Opener};
use crate::uri::Uri;
use crate::{Existing, MediumError, guard};

/// Several devices that hold the same blocks.
pub struct Mirror {
    shared: Arc<Shared>,
    description: String,
}

/// A device that is, or is to become, a leg.
#[derive(Clone)]
pub struct Leg {
    /// What it is called.
    pub name: String,
    /// The device, or why it cannot be had.
    pub medium: Result<Arc<dyn Medium>, String>,
}

/// What `tenmil mirror show` tells.
#[derive(Clone, Debug)]
pub struct Report {
    /// For each leg that was named: its name, and what it says or why it says nothing.
    pub legs: Vec<(String, Result<Superblock, String>)>,
    /// How the mirror would open: a description, or why it would not.
    pub verdict: Result<String, String>,
}

/// Bytes per second that are copied, unless the name says otherwise.
const RESYNC_DEFAULT: u64 = 100 << 20;
const CLEAR_AFTER: Span = Span::from_secs(2);
const PROBE_EVERY: Span = Span::from_secs(1);
/// Bytes that the background copies at once, as far as the legs take so many.
const CHUNK_BYTES: u32 = 256 << 10;
const DEPTH_MAX: u32 = 1024;
/// What a mirror can do if its legs can. What blocks read as after a deallocation, and what a copy
/// reads, would be up to each leg; legs have to be alike.
const OPERATIONS: [Operation; 7] = [
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::Compare,
    Operation::Verify,
];

/// Opens `mirror:[URI],[URI]?resync=100m`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let resync = parse(uri)?;
    let (legs, existing, handles) = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let mirror = Mirror::open(opener.regions, &legs, resync, &mut now)
        .map_err(|problem| MediumError::from(uri.refuse(problem)))?;
    let description = mirror.description.clone();
    Ok(Opened { medium: Arc::new(mirror), description, existing, handles })
}

fn parse(uri: &Uri) -> Result<u64, MediumError> {
    let mut fields = uri.fields();
    let resync = fields.size("resync")?.unwrap_or(RESYNC_DEFAULT);
    fields.finish()?;
    if uri.children().is_empty() {
        return Err(uri.refuse("the legs are missing, expected mirror:[URI],[URI]").into());
    }
    if resync == 0 {
        return Err(uri.refuse("resync is 0 bytes per second, expected at least 1").into());
    }
    Ok(resync)
}

/// Opens every leg that can be opened.
fn open_legs(opener: &Opener<'_>, uris: &[Uri]) -> (Vec<Leg>, Vec<Existing>, Vec<Handle>) {
    let (mut existing, mut handles) = (Vec::new(), Vec::new());
    let legs = uris.iter().map(|uri| {
        let opened = opener.open(uri).map_err(|error| error.to_string());
        let medium = opened.map(|opened| {
            existing.extend(opened.existing);
            handles.extend(opened.handles);
            opened.medium
        });
        Leg { name: uri.to_string(), medium }
    });
    (legs.collect(), existing, handles)
}

/// Makes a mirror of the devices that are named, in that order.
///
/// # Errors
///
/// If a device cannot be had or is too short, they differ in their blocks, or there is something on
/// one of them and `overwrite` is not set.
pub fn create(opener: &Opener<'_>, uris: &[Uri], overwrite: bool) -> Result<String, MediumError> {
    let refuse = |text: String| MediumError::new(Blame::Caller, format!("make a mirror: {text}"));
    if !(2..=LEGS_MAX).contains(&uris.len()) {
        let count = uris.len();
        return Err(refuse(format!("{count} legs are given, expected 2 to {LEGS_MAX}")));
    }
    if let Some(twice) = uris.iter().enumerate().find(|(index, uri)| uris[..*index].contains(uri)) {
        return Err(refuse(format!("{} is given twice, expected different devices", twice.1)));
    }
    let (legs, existing, _) = open_legs(opener, uris);
    if let Some(leg) = legs.iter().find(|leg| leg.medium.is_err()) {
        return Err(refuse(leg.medium.as_ref().err().cloned().unwrap_or_default()));
    }
    guard::allow("mirror create", &existing, overwrite, &Machine::this())
        .map_err(|not| MediumError::new(Blame::Caller, not.text))?;
    let uuid = u128::from(host::random_seed()) << 64 | u128::from(host::random_seed());
    let mut now = || opener.clock.now();
    format(opener.regions, &legs, uuid, &mut now).map_err(refuse)
}

/// What the legs of a mirror say, and whether it would open.
///
/// # Errors
///
/// If the name is not that of a mirror.
pub fn show(opener: &Opener<'_>, uri: &Uri) -> Result<Report, MediumError> {
    if uri.scheme() != "mirror" {
        return Err(uri.refuse("not a mirror, expected mirror:[URI],[URI]").into());
    }
    parse(uri)?;
    let (legs, ..) = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let candidates = look(opener.regions, &legs, &mut now)
        .map_err(|problem| MediumError::new(Blame::Machine, problem))?;
    let verdict = assemble(&candidates).map(|assembly| describe(&assembly, &candidates));
    let said = candidates.into_iter().map(|Candidate { name, found }| {
        let found = match found {
            Found::Leg(superblock) => Ok(*superblock),
            Found::Missing(why) => Err(why),
            Found::Strange(superblock::NoSuperblock::Raw) => Err("no superblock".into()),
            Found::Strange(superblock::NoSuperblock::Damaged(why)) => Err(why),
        };
        (name, found)
    });
    Ok(Report { legs: said.collect(), verdict })
}

impl Mirror {
    /// Opens a mirror over its legs. Requests name memory of `regions`, in which each channel takes
    /// a place. `resync` is how many bytes per second are copied; `now` reads the time while the
    /// superblocks are read.
    ///
    /// # Errors
    ///
    /// If these are not the legs of one mirror, contradict each other, or none is in sync.
    pub fn open(
        regions: &Regions,
        legs: &[Leg],
        resync: u64,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, String> {
        let policy =
            Policy { clear_after: CLEAR_AFTER, probe_every: PROBE_EVERY, copy_rate: resync };
        Self::open_with(regions, legs, policy, now)
    }

    fn open_with(
        regions: &Regions,
        legs: &[Leg],
        policy: Policy,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, String> {
        let candidates = look(regions, legs, now)?;
        let assembly = assemble(&candidates)?;
        let description = describe(&assembly, &candidates);
        let media: Box<[Option<Arc<dyn Medium>>]> = assembly.places[..usize::from(assembly.legs)]
            .iter()
            .map(|place| place.and_then(|index| legs[index].medium.as_ref().ok().cloned()))
            .collect();
        let there = assembly.places.iter().flatten().map(|index| &legs[*index]);
        for leg in there {
            check_leg(leg, &assembly.shape)?;
        }
        let limits = limits_of(&media, &assembly.shape);
        let chunk_bytes = CHUNK_BYTES
            .min(limits.request_blocks_max * limits.block_size)
            .max(2 * superblock_bytes(limits.block_size));
        let chunk_blocks = (chunk_bytes / limits.block_size).min(limits.request_blocks_max);
        let meta = Meta::new(&assembly, policy, chunk_blocks);
        let shared = Shared::new(media, regions.clone(), limits, chunk_bytes, meta);
        Ok(Self { shared: Arc::new(shared), description })
    }

    /// One line: which mirror, and which of its legs are in what state.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Legs that are in sync now, one bit each, and how many regions are still to be copied.
    pub fn progress(&self) -> (u8, u64) {
        let meta = self.shared.lock();
        (meta.in_sync, meta.todo.count())
    }
}

impl Medium for Mirror {
    fn limits(&self) -> Limits {
        self.shared.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        Ok(Box::new(MirrorChannel::open(&self.shared)?))
    }

    fn channels_max(&self) -> u32 {
        let legs = self.shared.media.iter().flatten();
        legs.map(|leg| leg.channels_max()).min().unwrap_or(u32::MAX)
    }

    fn extent(&self, lba: u64) -> Result<base::Extent, String> {
        let masks = self.shared.masks();
        let leg = self.shared.media[masks.source().trailing_zeros() as usize].as_ref();
        let leg = leg.ok_or("no leg of the mirror is there")?;
        let shape = &self.shared.shape;
        let left = shape.block_count.saturating_sub(lba);
        let extent = leg.extent(lba + shape.first)?;
        Ok(base::Extent { blocks: extent.blocks.min(left), ..extent })
    }
}

/// Writes fresh superblocks onto every leg, all in sync.
fn format(
    regions: &Regions,
    legs: &[Leg],
    uuid: u128,
    now: &mut dyn FnMut() -> Instant,
) -> Result<String, String> {
    let media: Vec<(&str, &Arc<dyn Medium>)> = legs
        .iter()
        .map(|leg| leg.medium.as_ref().map(|medium| (&*leg.name, medium)).map_err(Clone::clone))
        .collect::<Result<_, _>>()?;
    let (first_name, first) = media[0];
    let block_size = first.limits().block_size;
    if let Some((name, other)) = media.iter().find(|(_, leg)| leg.limits().block_size != block_size)
    {
        return Err(format!(
            "{name} has blocks of {} bytes, expected {block_size} as on {first_name}",
            other.limits().block_size
        ));
    }
    let blocks = media.iter().map(|(_, leg)| leg.limits().block_count).min().unwrap_or(0);
    let shape = Shape::over(block_size, blocks).ok_or_else(|| {
        format!("the shortest leg has {blocks} blocks of {block_size} bytes, expected over 1 MiB")
    })?;
    legs.iter().try_for_each(|leg| check_leg(leg, &shape))?;
    let count = u8::try_from(legs.len()).map_err(|_| "too many legs")?;
    let dirty = different(&media, &shape)?;
    let room = raw::room(regions)?;
    for (leg, (name, medium)) in (0..).zip(&media) {
        let mut raw = raw::Raw::open(regions, &room, &***medium)?;
        // Both copies, so that nothing older is left.
        for sequence in [1, 2] {
            let (generation, in_sync) = (1, u8::MAX >> (8 - count));
            let (legs, known, dirty) = (count, [1; LEGS_MAX], dirty.clone());
            let superblock =
                Superblock { uuid, sequence, generation, leg, legs, shape, in_sync, known, dirty };
            raw.write(&superblock, now).map_err(|problem| format!("{name}: {problem}"))?;
        }
    }
    let size = shape.block_count * u64::from(block_size);
    let (uuid, copied) = (uuid_text(uuid), dirty.count());
    let regions = shape.regions();
    Ok(format!("mirror {uuid}: {count} legs, {size} bytes, {copied} of {regions} regions to copy"))
}

/// Regions that are not known to read as zeroes on all legs.
fn different(media: &[(&str, &Arc<dyn Medium>)], shape: &Shape) -> Result<Bits, String> {
    let mut dirty = Bits::new(shape.regions());
    for (_, medium) in media {
        let mut at = 0;
        while at < shape.block_count {
            let extent = medium.extent(at + shape.first)?;
            let blocks = extent.blocks.clamp(1, shape.block_count - at);
            if extent.holds == base::Holds::Data {
                let (first, count) = shape.regions_of(at, blocks);
                (first..first + count).for_each(|region| {
                    dirty.set(region);
                });
            }
            at += blocks;
        }
    }
    Ok(dirty)
}

/// What lies where each leg should be.
fn look(
    regions: &Regions,
    legs: &[Leg],
    now: &mut dyn FnMut() -> Instant,
) -> Result<Vec<Candidate>, String> {
    let room = raw::room(regions)?;
    let candidates = legs.iter().map(|leg| {
        let opened = leg.medium.clone().and_then(|medium| raw::Raw::open(regions, &room, &*medium));
        let found = match opened {
            Err(why) => Found::Missing(why),
            Ok(mut raw) => raw.read(now),
        };
        Candidate { name: leg.name.clone(), found }
    });
    Ok(candidates.collect())
}

/// Refuses a leg that cannot carry a mirror of this shape.
fn check_leg(leg: &Leg, shape: &Shape) -> Result<(), String> {
    let Ok(medium) = &leg.medium else { return Ok(()) };
    let limits = medium.limits();
    let name = &leg.name;
    if limits.block_size != shape.block_size || limits.metadata_size != 0 {
        return Err(format!(
            "{name} has blocks of {} and {} bytes of metadata, expected {} and none",
            limits.block_size, limits.metadata_size, shape.block_size
        ));
    }
    let needed = shape.first + shape.block_count;
    if limits.block_count < needed {
        return Err(format!("{name} has {} blocks, expected {needed}", limits.block_count));
    }
    let superblock_blocks = superblock_bytes(shape.block_size) / shape.block_size;
    if limits.request_blocks_max < superblock_blocks {
        return Err(format!(
            "{name} takes {} blocks at once, expected {superblock_blocks} for a superblock",
            limits.request_blocks_max
        ));
    }
    let needs = [Operation::Read, Operation::Write, Operation::Flush];
    if let Some(lacks) = needs.into_iter().find(|need| !limits.support.has(*need)) {
        return Err(format!("{name} has no {}, expected one", lacks.name()));
    }
    Ok(())
}

/// The least of what the legs can do.
fn limits_of(media: &[Option<Arc<dyn Medium>>], shape: &Shape) -> Limits {
    let legs: Vec<Limits> = media.iter().flatten().map(|leg| leg.limits()).collect();
    let least = |of: fn(&Limits) -> u32| legs.iter().map(of).min().unwrap_or(0);
    let boundaries = legs.iter().map(|one| one.optimal_boundary_blocks);
    let boundary = boundaries.filter(|blocks| *blocks > 0).min().unwrap_or(0);
    let is_aligned = boundary > 0 && shape.first.is_multiple_of(boundary.into());
    let durability = legs.iter().map(|one| one.durability).reduce(Durability::weaker);
    let has = |operation: Operation| {
        let needed = match operation {
            Operation::Deallocate => Operation::WriteZeroes,
            other => other,
        };
        legs.iter().all(|one| one.support.has(needed))
    };
    let operations: Vec<Operation> = OPERATIONS.into_iter().filter(|one| has(*one)).collect();
    Limits {
        block_size: shape.block_size,
        metadata_size: 0,
        block_count: shape.block_count,
        request_blocks_max: least(|one| one.request_blocks_max),
        segments_max: legs.iter().map(|one| one.segments_max).min().unwrap_or(0),
        optimal_boundary_blocks: if is_aligned { boundary } else { 0 },
        atomic_write_blocks: least(|one| one.atomic_write_blocks),
        depth_max: least(|one| one.depth_max).min(DEPTH_MAX),
        durability: durability.unwrap_or(Durability::None),
        support: Support::of(&operations),
    }
}

/// One line about a mirror that has been put together.
fn describe(assembly: &Assembly, candidates: &[Candidate]) -> String {
    let Assembly { uuid, legs, in_sync, places, dirty, .. } = assembly;
    let (uuid, sound) = (uuid_text(*uuid), in_sync.count_ones());
    let mut text = format!("mirror {uuid}: {sound} of {legs} legs in sync");
    if sound < u32::from(*legs) {
        text += ", degraded";
    }
    for leg in 0..*legs {
        let place = places[usize::from(leg)];
        match place.map(|index| &candidates[index].name) {
            Some(_) if in_sync & (1 << leg) != 0 => {}
            Some(name) => {
                let _ = write!(text, "; leg {leg} ({name}) is stale and is copied to");
            }
            None => {
                let _ = write!(text, "; leg {leg} is missing");
            }
        }
    }
    for Candidate { name, found } in candidates {
        if let Found::Missing(why) = found {
            let _ = write!(text, "; {name} cannot be had: {why}");
        }
    }
    if sound > 1 && !dirty.is_empty() {
        let _ = write!(
            text,
            "; {} regions are copied, from leg {}",
            dirty.count(),
            in_sync.trailing_zeros()
        );
    }
    text
}

impl std::fmt::Debug for Mirror {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Mirror").field(&self.description).finish()
    }
}
