//! A volume for the tests of everything that stands on devices: made when there is none yet.

use std::sync::Arc;

use base::Span;

use crate::backend::store::{Change, OpenStore, Place, Shape, make, open_volume};
use crate::uri::Uri;
use crate::{Kind, MediumError, Opened, Opener};

/// Opens `stored:[URI]`, or `stored:[URI],[URI]`, as the volume `v` of the store on the devices, with half
/// as many blocks as they have, and makes both first if there is no store.
pub(crate) struct StoredKind {
    /// How long the last flush may take when it is closed: none is a loss of power.
    pub(crate) closing_max: Span,
}

impl StoredKind {
    /// Who closes in order.
    pub(crate) const ORDERLY: Self = Self { closing_max: Span::from_secs(30) };
}

impl Kind for StoredKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let (device, others) = (&uri.children()[0], &uri.children()[1..]);
        let below = opener.open(device)?;
        let shape = Shape::of(device, &below.medium.limits())?;
        let place = Place::on(device);
        if make::look(opener, &place, &*below.medium, &shape, None).is_err() {
            let steps = make::steps(device, "tests", &shape)?;
            make::format(opener, device, &*below.medium, &shape, steps)?;
        }
        let open = Arc::new(OpenStore::over(opener, &place, below, self.closing_max)?);
        if open.devices().len() == 1 && !others.is_empty() {
            open.grow(opener, others, true)?;
        }
        if open.find("v").is_err() {
            let pages = open.devices().iter().map(|device| device.blocks).sum::<u64>();
            let (name, blocks) = ("v".into(), pages / 2);
            open.change(Change::Create { name, blocks, unit: 4, uuid: 1, checksums: false })?;
        }
        open_volume(opener, &open, uri, "v")
    }
}
