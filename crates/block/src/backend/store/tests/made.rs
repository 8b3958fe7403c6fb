//! A volume for the tests of everything that stands on devices: made when there is none yet.

use std::sync::Arc;

use base::Span;

use crate::backend::store::{Change, OpenStore, Place, Shape, make, open_volume};
use crate::uri::Uri;
use crate::{Kind, MediumError, Opened, Opener};

/// Opens `stored:[URI]` as the volume `v` of the store on the device, with half as many blocks as the
/// device has, and makes both first if there is no store.
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
        let device = uri.only_child()?;
        let below = opener.open(device)?;
        let shape = Shape::of(device, &below.medium.limits())?;
        let place = Place::on(device);
        if make::look(opener, &place, &*below.medium, &shape).is_err() {
            let steps = make::steps(device, "tests", &shape)?;
            make::format(opener, device, &*below.medium, &shape, steps)?;
        }
        let open = Arc::new(OpenStore::over(opener, &place, below, self.closing_max)?);
        if open.find("v").is_err() {
            let (name, blocks) = ("v".into(), shape.pages / 2);
            open.change(Change::Create { name, blocks, unit: 4, uuid: 1, checksums: false })?;
        }
        open_volume(opener, &open, uri, "v")
    }
}
