//! Devices of an open pool: the first one, given by its URI, and the others, which its superblock lists.
//!
//! A device is identified by its label, wherever it is found. Its URI is recorded in the superblock, and
//! is changed by `tenmil pool set --device 1=URI` after a move.

use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{BlockDevice, ErrorCategory};
use tenmil_volume::Pool;
use tenmil_volume::device_table::{DeviceLabel, DeviceTable, SecondaryDevice};
use tenmil_volume::format::decode_superblock;

use super::missing_device::MissingDevice;
use super::page_io::BlockingPageIo;
use super::spanned_device::{PoolDeviceSpan, SpannedDevice};
use super::{PAGE_BYTES, PageGeometry, VolumeRef};
use tenmil_base::Error;
use tenmil_base::text::quote_shell_word;
use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_block::{OpenedDevice, Opener};

/// Devices of an open pool.
pub(super) struct PoolDevices {
    /// All devices as one; the first device itself if it is the only one.
    pub(super) medium: Arc<dyn BlockDevice>,
    pub(super) geometry: PageGeometry,
    /// By device number.
    pub(super) members: Vec<PoolDevice>,
}

/// One device of an open pool.
pub(super) struct PoolDevice {
    pub(super) uri: Uri,
    pub(super) opened: OpenedDevice,
    pub(super) geometry: PageGeometry,
    /// Which device it is, wherever it goes.
    pub(super) identity: DeviceIdentity,
    /// Whether it could be had.
    is_there: bool,
}

/// A device of a pool, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Device number; zero is the first.
    pub number: u32,
    /// URI.
    pub uri: String,
    /// 4 KiB blocks of the pool on it.
    pub blocks: u64,
}

impl PoolDevice {
    pub(super) fn from_opened(uri: &Uri, opened: OpenedDevice) -> Result<Self, Error> {
        let geometry = PageGeometry::from_limits(uri, &opened.medium.limits())?;
        let identity = DeviceIdentity::of_opened(uri, &opened);
        Ok(Self { uri: uri.clone(), opened, geometry, identity, is_there: true })
    }

    fn missing(uri: &Uri, like: &Self) -> Self {
        let medium = Arc::new(MissingDevice(like.opened.medium.limits()));
        let opened =
            OpenedDevice::without_existing_data(medium, format!("{uri:#}, which is missing"));
        let (geometry, identity) = (like.geometry, DeviceIdentity::of_uri(uri));
        Self { uri: uri.clone(), opened, geometry, identity, is_there: false }
    }

    /// The problem of a device that is smaller than its part of the pool.
    fn size_problem(&self, devices: &DeviceTable, number: u32) -> Option<String> {
        let (found, needed) = (self.geometry.pages, devices.device_blocks_min(number));
        let page = u64::from(PAGE_BYTES);
        let (found_bytes, needed_bytes) = (found * page, needed * page);
        (found < needed)
            .then(|| format!("it has {found_bytes} bytes, expected {needed_bytes} at least"))
    }

    /// Reads its first page.
    pub(super) fn read_first_page(&self, opener: &Opener<'_>) -> Result<[u8; 4096], Error> {
        let refuse = |category, problem: String| Error::new(category, problem);
        let raw = BlockingPageIo::open(
            opener.regions,
            &opener.clock,
            &*self.opened.medium,
            &self.geometry,
        );
        let mut raw =
            raw.map_err(|problem| refuse(ErrorCategory::Environment, problem.to_string()))?;
        let mut page = [0; 4096];
        raw.read(0, &mut page).map_err(|status| {
            refuse(ErrorCategory::Remote, format!("read its label: {status}, expected success"))
        })?;
        Ok(page)
    }
}

impl PoolDevices {
    /// A pool with a single open device.
    pub(super) fn with_single_device(device: &Uri, opened: OpenedDevice) -> Result<Self, Error> {
        let member = PoolDevice::from_opened(device, opened)?;
        let (medium, geometry) = (Arc::clone(&member.opened.medium), member.geometry);
        Ok(Self { medium, geometry, members: vec![member] })
    }

    /// Opens the other devices of a pool.
    pub(super) fn open_others(
        &mut self,
        opener: &Opener<'_>,
        place: &VolumeRef,
        store: &Pool,
        is_read: bool,
    ) -> Result<(), Error> {
        let devices = store.devices();
        for (number, other) in (1..).zip(&devices.others) {
            let uri = place.device_uri(number, other)?;
            let way = if is_read { uri.clone().read_only() } else { uri.clone() };
            let member = open_other_device(opener, store, &way, number, other).map_err(|error| {
                let text = format!("{:#}: device {number}, {uri:#}: {error}", place.store);
                let hint = format!(
                    "Reconnect it, or name its new location: `tenmil pool set {} --device {number}=URI`; \
                     `tenmil pool rescue` copies what lies on the others.",
                    quote_shell_word(&format!("{:#}", place.store))
                );
                Error::new(error.category(), text).with_hint(hint)
            })?;
            self.members.push(PoolDevice { uri, ..member });
        }
        self.combine(devices);
        Ok(())
    }

    /// Opens all available other devices read-only. Returns the problems of the rest.
    pub(super) fn open_available(
        &mut self,
        opener: &Opener<'_>,
        place: &VolumeRef,
        store: &Pool,
    ) -> Result<Vec<String>, Error> {
        let (devices, mut missing) = (store.devices(), Vec::new());
        let first = &self.members[0];
        missing
            .extend(first.size_problem(devices, 0).map(|lacks| format!("{}: {lacks}", first.uri)));
        for (number, other) in (1..).zip(&devices.others) {
            let uri = place.device_uri(number, other)?.read_only();
            let member = match open_labeled_device(opener, store, &uri, number, other) {
                Ok(member) => {
                    let lacks = member.size_problem(devices, number);
                    missing.extend(lacks.map(|lacks| format!("device {number}, {uri:#}: {lacks}")));
                    member
                }
                Err(error) => {
                    missing.push(format!("device {number}, {uri:#}: {error}"));
                    PoolDevice::missing(&uri, &self.members[0])
                }
            };
            self.members.push(member);
        }
        Ok(missing)
    }

    /// Combines all available devices, as far as they reach. Returns the block ranges of the pool that
    /// are available.
    pub(super) fn combine_available(&mut self, devices: &DeviceTable) -> Vec<Range<u64>> {
        let members = &self.members;
        let absent: Arc<dyn BlockDevice> =
            Arc::new(MissingDevice(members[0].opened.medium.limits()));
        let (mut legs, mut present) = (Vec::new(), Vec::new());
        for (begin, run) in devices.spans_with_start() {
            let Some(member) = members.get(run.device as usize) else { continue };
            let has =
                if member.is_there { member.geometry.pages.saturating_sub(run.at) } else { 0 };
            let has = has.min(run.blocks);
            if has > 0 {
                let medium = Arc::clone(&member.opened.medium);
                legs.push(PoolDeviceSpan { medium, begin, at: run.at });
                present.push(begin..begin + has);
            }
            if has < run.blocks {
                legs.push(PoolDeviceSpan {
                    medium: Arc::clone(&absent),
                    begin: begin + has,
                    at: 0,
                });
            }
        }
        legs.push(PoolDeviceSpan { medium: absent, begin: devices.blocks(), at: 0 });
        self.geometry = combined_geometry(members, devices.blocks());
        self.medium = Arc::new(SpannedDevice::new(legs, devices.blocks()));
        present
    }

    /// Combines devices by their labels alone, read-only, for a pool whose device table is lost.
    pub(super) fn from_labels(
        labelled: Vec<(DeviceLabel, PoolDevice)>,
        first: Option<PoolDevice>,
    ) -> Option<(Self, Vec<Range<u64>>)> {
        let mut parts: Vec<(u64, PoolDevice)> =
            first.into_iter().map(|member| (0, member)).collect();
        parts.extend(labelled.into_iter().map(|(label, member)| (label.begin, member)));
        parts.sort_unstable_by_key(|(begin, _)| *begin);
        let absent = Arc::new(MissingDevice(parts.first()?.1.opened.medium.limits()));
        let (mut legs, mut present, mut end): (Vec<PoolDeviceSpan>, Vec<Range<u64>>, u64) =
            Default::default();
        for (begin, member) in &parts {
            if *begin > end {
                legs.push(PoolDeviceSpan { medium: absent.clone(), begin: end, at: 0 });
            }
            let at = u64::from(*begin > 0);
            legs.push(PoolDeviceSpan {
                medium: Arc::clone(&member.opened.medium),
                begin: *begin,
                at,
            });
            end = begin + member.geometry.pages.saturating_sub(at);
            present.push(*begin..end);
        }
        // A device larger than its part of the pool ends where the next one begins.
        for index in 1..present.len() {
            present[index - 1].end = present[index - 1].end.min(present[index].start);
        }
        legs.push(PoolDeviceSpan { medium: absent, begin: end, at: 0 });
        let medium = Arc::new(SpannedDevice::new(legs, end));
        let members: Vec<PoolDevice> = parts.into_iter().map(|(_, member)| member).collect();
        let geometry = combined_geometry(&members, end);
        Some((Self { medium, geometry, members }, present))
    }

    /// Combines all devices according to the device table.
    pub(super) fn combine(&mut self, devices: &DeviceTable) {
        let members = &self.members;
        if devices.count() == 1 {
            let first = &members[0];
            (self.medium, self.geometry) = (Arc::clone(&first.opened.medium), first.geometry);
            return;
        }
        let leg = |(begin, run): (u64, tenmil_volume::device_table::DeviceSpan)| {
            let member = members.get(run.device as usize)?;
            Some(PoolDeviceSpan { medium: Arc::clone(&member.opened.medium), begin, at: run.at })
        };
        let legs = devices.spans_with_start().filter_map(leg).collect();
        self.geometry = combined_geometry(members, devices.blocks());
        self.medium = Arc::new(SpannedDevice::new(legs, devices.blocks()));
    }

    /// One-line description.
    pub(super) fn description(&self) -> String {
        let each: Vec<&str> =
            self.members.iter().map(|member| &*member.opened.description).collect();
        each.join("; and ")
    }

    /// Reports on each device.
    pub(super) fn infos(&self, devices: &DeviceTable) -> Vec<DeviceInfo> {
        let info = |(number, member): (u32, &PoolDevice)| {
            let (uri, blocks) = (member.uri.to_string(), devices.pool_block_count_on(number));
            DeviceInfo { number, uri, blocks }
        };
        (0..).zip(&self.members).take(devices.count()).map(info).collect()
    }
}

/// Page layout of all devices: blocks of the first one, and the smallest request limit.
fn combined_geometry(members: &[PoolDevice], pages: u64) -> PageGeometry {
    let least = members.iter().map(|member| member.geometry.request_pages).min().unwrap_or(1);
    PageGeometry { pages, request_pages: least, ..members[0].geometry }
}

/// Opens a device of a pool, and verifies its label and size.
fn open_other_device(
    opener: &Opener<'_>,
    store: &Pool,
    uri: &Uri,
    number: u32,
    other: &SecondaryDevice,
) -> Result<PoolDevice, Error> {
    let member = open_labeled_device(opener, store, uri, number, other)?;
    match member.size_problem(store.devices(), number) {
        Some(lacks) => Err(Error::new(ErrorCategory::Usage, lacks)),
        None => Ok(member),
    }
}

/// Opens a device of a pool, and verifies its label.
fn open_labeled_device(
    opener: &Opener<'_>,
    store: &Pool,
    uri: &Uri,
    number: u32,
    other: &SecondaryDevice,
) -> Result<PoolDevice, Error> {
    let member = PoolDevice::from_opened(uri, opener.open(uri)?)?;
    let page = member.read_first_page(opener)?;
    let expected = format!("expected device {number} of pool `{}`", store.name());
    let refuse = |found: String| {
        Error::new(ErrorCategory::Usage, format!("{found}, {expected} ({:032x})", store.uuid()))
    };
    let label = DeviceLabel::decode(&page)
        .map_err(|flaw| refuse(describe_unlabeled_device(&page, &flaw)))?;
    if label.store != store.uuid() || label.number != number {
        return Err(refuse(describe_label(&label)));
    }
    if label.uuid != other.uuid {
        let found = format!("its label is an old one, {:032x}", label.uuid);
        return Err(refuse(format!("{found}, where the pool has {:032x}", other.uuid)));
    }
    Ok(member)
}

/// Describes a device by its label.
pub(super) fn describe_label(label: &DeviceLabel) -> String {
    let DeviceLabel { number, name, store, first_uri, .. } = label;
    format!(
        "it is device {number} of pool `{name}` ({store:032x}), whose first device was {}",
        short_form_for_terminal(first_uri)
    )
}

/// Describes a device without a valid label.
fn describe_unlabeled_device(page: &[u8; 4096], flaw: &tenmil_volume::CorruptionKind) -> String {
    match decode_superblock(page, 0) {
        Ok((store, ..)) => format!("it is the first device of pool {store:032x}"),
        Err(_) => format!("its label cannot be read: {flaw}"),
    }
}
