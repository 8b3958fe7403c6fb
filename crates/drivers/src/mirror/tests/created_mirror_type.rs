//! A mirror for the tests of devices that are placed on others: created when there is none yet.

use std::sync::Arc;

use tenmil_base::Span;

use crate::mirror::assembly::LegReadResult;
use crate::mirror::create::format_mirror;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::{Mirror, MirrorOptions, OpenedLegs, open_legs, read_leg_candidates};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};
use tenmil_volume::mirror::SuperblockError;

/// Opens `made:[URI],[URI]` as `mirror:` does, with fast background work, and creates the mirror first if
/// no leg has a superblock.
pub(crate) struct CreatedMirrorType;

const POLICY: ResyncPolicy = ResyncPolicy {
    clear_after: Span::from_us(40),
    probe_every: Span::from_us(20),
    copy_rate: 4 << 30,
};

impl DeviceType for CreatedMirrorType {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let OpenedLegs { legs, existing, handles, identities } = open_legs(opener, uri.children());
        let mut now = || opener.clock.now();
        let refuse = |problem: Error| Error::from(uri.error(problem));
        let found = read_leg_candidates(opener.regions, &legs, &mut now).map_err(refuse)?;
        if found.iter().all(|leg| leg.found == LegReadResult::Foreign(SuperblockError::Absent)) {
            format_mirror(opener.regions, &legs, 7, &mut now).map_err(refuse)?;
        }
        let mirror = Mirror::open(
            opener.regions,
            &legs,
            &MirrorOptions::with_resync_policy(POLICY),
            &mut now,
        )
        .map_err(refuse)?;
        let description = mirror.description().to_owned();
        let medium = Arc::new(mirror);
        Ok(OpenedDevice { medium, description, existing, handles, identities })
    }
}
