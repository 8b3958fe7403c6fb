//! A mirror for the tests of everything that stands on devices: made when there is none yet.

use std::sync::Arc;

use base::Span;

use crate::backend::mirror::assemble::Found;
use crate::backend::mirror::make::format;
use crate::backend::mirror::superblock::NoSuperblock;
use crate::backend::mirror::tend::Policy;
use crate::backend::mirror::{Mirror, MirrorOptions, OpenLegs, look, open_legs};
use crate::uri::Uri;
use crate::{Kind, MediumError, Opened, Opener};

/// Opens `made:[URI],[URI]` as `mirror:` does, with a background in a hurry, and makes the mirror
/// first if no leg has a superblock.
pub(crate) struct MadeKind;

const POLICY: Policy =
    Policy { clear_after: Span::from_us(40), probe_every: Span::from_us(20), copy_rate: 4 << 30 };

impl Kind for MadeKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let OpenLegs { legs, existing, handles, identities } = open_legs(opener, uri.children());
        let mut now = || opener.clock.now();
        let refuse = |problem: String| MediumError::from(uri.refuse(problem));
        let found = look(opener.regions, &legs, &mut now).map_err(refuse)?;
        if found.iter().all(|leg| leg.found == Found::Strange(NoSuperblock::Raw)) {
            format(opener.regions, &legs, 7, &mut now).map_err(refuse)?;
        }
        let mirror = Mirror::open(opener.regions, &legs, &MirrorOptions::paced(POLICY), &mut now)
            .map_err(refuse)?;
        let description = mirror.describe().to_owned();
        let medium = Arc::new(mirror);
        Ok(Opened { medium, description, existing, handles, identities })
    }
}
