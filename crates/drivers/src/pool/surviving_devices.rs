//! Surviving devices of a damaged pool, and the blocks of the pool on them.
//!
//! The first device lists the others. If it is lost or unreadable, the label of each other device states
//! where its part of the pool begins. The parts that a device gained when it was no longer the last one
//! are recorded on the first device only.

use tenmil_base::ErrorCategory;
use tenmil_volume::device_table::DeviceLabel;
use tenmil_volume::rescue::PoolRescue;
use tenmil_volume::{PoolError, PoolOpening};

use super::page_io::BlockingPageIo;
use super::pool_devices::{PoolDevice, PoolDevices};
use super::{VolumeRef, pool_error};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;

/// The surviving devices.
pub(super) struct SurvivingDevices {
    pub(super) pool_devices: PoolDevices,
    pub(super) rescue: PoolRescue,
    /// Problems of missing devices.
    pub(super) missing: Vec<String>,
}

impl SurvivingDevices {
    /// Opens read-only what is available of the pool on a device, and other given devices of it.
    ///
    /// # Errors
    ///
    /// If the first given device cannot be opened, another one has no label, they belong to different
    /// pools, or the pool has a newer version.
    pub(super) fn open(
        opener: &Opener<'_>,
        place: &VolumeRef,
        others: &[Uri],
    ) -> Result<Self, Error> {
        let device = place.store.clone().read_only();
        let mut pool_devices = PoolDevices::with_single_device(&device, opener.open(&device)?)?;
        let pages = pool_devices.geometry.pages;
        let raw = BlockingPageIo::open(
            opener.regions,
            &opener.clock,
            &*pool_devices.medium,
            &pool_devices.geometry,
        );
        let mut raw = raw.map_err(|problem| {
            Error::new(ErrorCategory::Environment, format!("{device:#}: {problem}"))
        })?;
        let mut opening = PoolOpening::new(pages, 0).for_rescue();
        while let Some(at) = opening.next_read() {
            let mut page = [0; 4096];
            let read = raw.read(at, &mut page);
            opening.handle_read(read.map(|()| &page));
        }
        drop(raw);
        match opening.finish() {
            Ok(opened) => {
                let missing = pool_devices.open_available(opener, place, &opened.store)?;
                let present = pool_devices.combine_available(opened.store.devices());
                let rescue = PoolRescue::new(pages).restricted_to(present.into_iter());
                Ok(Self { pool_devices, rescue, missing })
            }
            Err(PoolError::NotFirst(label)) => {
                let first = pool_devices.members.remove(0);
                Self::by_labels(opener, Some((*label, first)), None, others)
            }
            Err(PoolError::NotAPool(_)) if !others.is_empty() => {
                let first = pool_devices.members.remove(0);
                Self::by_labels(opener, None, Some(first), others)
            }
            // In a damaged pool, anything may be in place of the superblocks.
            Err(PoolError::NotAPool(_)) => {
                Ok(Self { pool_devices, rescue: PoolRescue::new(pages), missing: Vec::new() })
            }
            Err(error) => Err(pool_error(&format!("{device:#}"), &error)),
        }
    }

    /// Combines devices by their labels.
    fn by_labels(
        opener: &Opener<'_>,
        named: Option<(DeviceLabel, PoolDevice)>,
        first: Option<PoolDevice>,
        others: &[Uri],
    ) -> Result<Self, Error> {
        let mut labelled: Vec<(DeviceLabel, PoolDevice)> = named.into_iter().collect();
        for uri in others {
            let uri = uri.clone().read_only();
            let refuse =
                |problem: String| Error::new(ErrorCategory::Usage, format!("{uri:#}: {problem}"));
            let member = PoolDevice::from_opened(&uri, opener.open(&uri)?)?;
            let label = DeviceLabel::decode(&member.read_first_page(opener)?);
            let label =
                label.map_err(|flaw| refuse(format!("its label cannot be read: {flaw}")))?;
            if let Some((known, _)) =
                labelled.first().filter(|(known, _)| known.store != label.store)
            {
                let (found, expected) = (label.store, known.store);
                let problem =
                    format!("it is of pool {found:032x}, expected one of {expected:032x}");
                return Err(refuse(problem));
            }
            if labelled.iter().any(|(known, _)| known.begin == label.begin) {
                let problem = format!("device {} is given twice, expected once", label.number);
                return Err(refuse(problem));
            }
            labelled.push((label, member));
        }
        let first_pages = first.as_ref().map_or(0, |first| first.geometry.pages);
        let lost = format!("device 0, {}", labelled.first().map_or("", |(one, _)| &*one.first_uri));
        let missing = match first {
            Some(_) => Vec::new(),
            None => vec![format!("{lost}: not named, and what lies on it is not looked for")],
        };
        let nothing = || Error::new(ErrorCategory::Usage, "no device is named".to_owned());
        let (pool_devices, present) =
            PoolDevices::from_labels(labelled, first).ok_or_else(nothing)?;
        let rescue = PoolRescue::new(first_pages).restricted_to(present.into_iter());
        Ok(Self { pool_devices, rescue, missing })
    }
}
