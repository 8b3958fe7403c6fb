//! Grows an open pool: by the added size of its devices, and by added devices.
//!
//! ```text
//!   the growing thread    labels, flushed | a channel for each client | the commit that counts them
//!   a client with a channel           ...receives it in its inbox, before any address on the device
//! ```
//!
//! Every client that transfers data or metadata has its own channel to the devices. A channel to a new
//! device is sent to its inbox, before any block there: messages are in order, and new blocks are
//! allocated only after the commit. So the I/O path has no check for it.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Durability, ErrorCategory, IoChannel, Limits, Operation};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_volume::device_table::{DeviceLabel, DeviceTable, LABEL_BLOCKS, SecondaryDevice};
use tenmil_volume::format::STORE_BLOCKS_MIN;
use tenmil_volume::{PoolError, PoolRequest, PoolResponse};

use super::create_pool::commit_created_files;
use super::missing_device::MissingDevice;
use super::page_io::BlockingPageIo;
use super::pool_devices::{DeviceInfo, PoolDevice, PoolDevices, describe_label};
use super::spanned_device::{PoolDeviceSpan, SpanMap, limits_with_unbounded_size};
use super::{OpenPool, PAGE_BYTES};
use crate::multi_leg_channel::MultiLegChannel;
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::overwrite;
use tenmil_block::uri::Uri;

/// Result of growing a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowResult {
    /// Previous number of 4 KiB blocks.
    pub before: u64,
    /// New number of blocks.
    pub blocks: u64,
    /// Given devices that belong to the pool already, by number.
    pub were_there: Vec<u32>,
    /// All devices of the pool.
    pub devices: Vec<DeviceInfo>,
}

/// Channel to an added device, for a client with a channel to the previous ones.
pub(super) struct NewDeviceChannel {
    /// The channel to the previous devices has to be set as its first leg.
    pub(super) channel: Box<MultiLegChannel<SpanMap>>,
    /// New maximum of pages in a request.
    pub(super) request_pages: u32,
}

/// A device to be added.
struct NewDevice {
    member: PoolDevice,
    uuid: u128,
}

/// What a pool grows by, checked and not yet written.
struct GrowthPlan {
    new: Vec<NewDevice>,
    devices: DeviceTable,
    before: u64,
    were_there: Vec<u32>,
}

impl std::fmt::Debug for NewDeviceChannel {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("More").finish_non_exhaustive()
    }
}

impl NewDeviceChannel {
    /// Combines it with the channel to the previous devices, which has `owed` pending completions.
    pub(super) fn combine_with_previous(
        mut self,
        first: Box<dyn IoChannel>,
        owed: usize,
    ) -> Box<dyn IoChannel> {
        self.channel.replace_first_channel(first, owed);
        self.channel
    }
}

impl OpenPool {
    /// The devices of the pool.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        let pool_devices = self.lock_pool_devices();
        pool_devices.infos(self.shared.lock().store.devices())
    }

    /// Grows the pool by the added size of its devices, and by added devices, which must be empty unless
    /// `overwrite` is set. The pool stays in use meanwhile.
    ///
    /// # Errors
    ///
    /// If a device cannot be opened, is too small, has data or belongs to another pool; or if a write to
    /// it or to the pool fails. The size of the pool is then unchanged.
    pub fn grow_pool(
        &self,
        opener: &Opener<'_>,
        added: &[Uri],
        overwrite: bool,
    ) -> Result<GrowResult, Error> {
        let mut pool_devices = self.lock_pool_devices();
        // Also in a process that makes files at once: none is made or grown if the pool is not.
        let growth = tenmil_linux::storage_file::create_files_if_ok(|| {
            self.plan_growth(&mut pool_devices, opener, added, overwrite)
        })?;
        commit_created_files()?;
        let GrowthPlan { new, devices, before, were_there } = growth;
        // Order: labels are durable before the commit that counts the devices, and every client has its
        // channel before that.
        let first_uri = pool_devices.members[0].uri.clone().for_probing().to_string();
        for one in new {
            let number = u32::try_from(pool_devices.members.len()).unwrap_or(u32::MAX);
            let label = self.device_label(&one, number, &devices, &first_uri);
            self.reserved.reserve_added_device(&one.member.opened.medium)?;
            write_label(opener, &one.member, &label)?;
            pool_devices.members.push(one.member);
        }
        self.send_device_channels_to_clients(&mut pool_devices, &devices)?;
        match self.request_and_wait(PoolRequest::Grow(devices.clone()))? {
            PoolResponse::Done => {}
            _ => {
                return Err(self.grow_error("grow: found another reply, expected an end".into()));
            }
        }
        let blocks = devices.blocks();
        Ok(GrowResult { before, blocks, were_there, devices: pool_devices.infos(&devices) })
    }

    /// Opens and checks what is added. Nothing is written.
    fn plan_growth(
        &self,
        pool_devices: &mut PoolDevices,
        opener: &Opener<'_>,
        added: &[Uri],
        overwrite: bool,
    ) -> Result<GrowthPlan, Error> {
        let state = self.shared.lock();
        let (mut devices, before) =
            (state.store.uncommitted_devices().clone(), state.store.blocks());
        drop(state);
        if let Some(owner) = self.other_owner() {
            return Err(self.pool_error(&PoolError::Owned { by: Box::new(owner) }));
        }
        pool_devices.members.truncate(devices.count());
        pool_devices.refresh_sizes(&mut devices)?;
        let mut were_there = Vec::new();
        let mut new: Vec<NewDevice> = Vec::new();
        for uri in added {
            let (found, identity) = (uri.clone().for_probing(), DeviceIdentity::of_uri(uri));
            let is_it = |member: &PoolDevice| {
                member.uri.clone().for_probing() == found
                    || member.identity.is_same_device(&identity)
            };
            match pool_devices.members.iter().position(is_it) {
                Some(number) => were_there.push(u32::try_from(number).unwrap_or(u32::MAX)),
                None => new.push(self.check_new_device(opener, uri, &devices, &new, overwrite)?),
            }
        }
        for one in &new {
            let (uuid, uri) = (one.uuid, one.member.uri.to_string());
            devices.add_device(SecondaryDevice { uuid, uri }, one.member.geometry.pages);
        }
        devices.check().map_err(|error| self.pool_error(&error))?;
        self.check_limits_not_stricter(pool_devices, &new)?;
        Ok(GrowthPlan { new, devices, before, were_there })
    }

    /// Records the current URIs of the devices. Returns whether any has changed.
    ///
    /// # Errors
    ///
    /// If the write fails.
    pub fn record_device_uris(&self) -> Result<bool, Error> {
        let pool_devices = self.lock_pool_devices();
        let mut devices = self.shared.lock().store.uncommitted_devices().clone();
        let before = devices.clone();
        for (other, member) in devices.others.iter_mut().zip(&pool_devices.members[1..]) {
            other.uri = member.uri.to_string();
        }
        devices.check().map_err(|error| self.pool_error(&error))?;
        if devices != before {
            self.request_and_wait(PoolRequest::Grow(devices))?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Records a new URI of a device that is open in this process. Returns whether it has changed.
    ///
    /// # Errors
    ///
    /// If there is no such device, another device is at that URI, or the write fails.
    pub fn record_device_uri(
        &self,
        opener: &Opener<'_>,
        number: u32,
        uri: &Uri,
    ) -> Result<bool, Error> {
        let name = self.name();
        let mut pool_devices = self.lock_pool_devices();
        let last = pool_devices.members.len() - 1;
        let refuse = |text: Error| Error::new(ErrorCategory::Usage, text);
        let Some(member) = pool_devices.members.get_mut(number as usize).filter(|_| number > 0)
        else {
            let text = format!("pool `{name}`: it has no device {number}, expected {last} at most");
            return Err(refuse(Error::environment(text)));
        };
        if !is_same_device(opener, uri, &member.identity) {
            let text = format!(
                "pool `{name}`: {uri:#} is not device {number} of it, which process {} has open and calls \
                 {}; expected that one under another name",
                std::process::id(),
                member.uri
            );
            let hint = "To replace it with a copy, end the process, and repeat the command.";
            return Err(refuse(Error::environment(text)).with_hint(hint));
        }
        let before = std::mem::replace(&mut member.uri, uri.clone());
        drop(pool_devices);
        self.record_device_uris()
            .inspect_err(|_| self.lock_pool_devices().members[number as usize].uri = before)
    }

    /// Checks a device that is to be added.
    fn check_new_device(
        &self,
        opener: &Opener<'_>,
        uri: &Uri,
        devices: &DeviceTable,
        new: &[NewDevice],
        overwrite: bool,
    ) -> Result<NewDevice, Error> {
        let refuse =
            |problem: Error| Error::new(ErrorCategory::Usage, format!("{uri:#}: {problem}"));
        let mut member = PoolDevice::from_opened(uri, opener.open(uri)?)?;
        member.uri = uri.clone().for_probing();
        let (found, needed) = (member.geometry.pages, STORE_BLOCKS_MIN + LABEL_BLOCKS);
        if found < needed {
            let problem = format!("it has {found} blocks of 4 KiB, expected {needed} at least");
            return Err(refuse(Error::environment(problem)));
        }
        let label = DeviceLabel::decode(&member.read_first_page(opener)?).ok();
        let ours = label.filter(|label| label.store == self.uuid());
        let is_known = |uuid: u128| devices.others.iter().any(|other| other.uuid == uuid);
        if let Some(label) = ours.as_ref().filter(|label| is_known(label.uuid)) {
            let said = describe_label(label);
            return Err(refuse(Error::environment(format!(
                "{said}, or a copy of that, expected one that is new to it"
            ))));
        }
        if ours.as_ref().is_some_and(|label| new.iter().any(|one| one.uuid == label.uuid)) {
            return Err(refuse(Error::environment("it is given twice, expected once")));
        }
        // A label of this pool that no superblock counts is left from a grow interrupted by a power loss.
        if ours.is_none() {
            overwrite::check_overwrite_allowed(
                "pool grow",
                &member.opened.existing,
                overwrite,
                &KernelFiles::live_system(),
            )?;
        }
        if member.uri != *uri {
            // The recorded URI must also find it.
            let found = member.uri.clone();
            drop(member);
            member = PoolDevice::from_opened(&found, opener.open(&found)?)?;
        }
        let uuid =
            u128::from(tenmil_linux::random_seed()) << 64 | u128::from(tenmil_linux::random_seed());
        Ok(NewDevice { member, uuid })
    }

    /// Rejects devices with stricter limits while volumes are open, which use the current ones.
    fn check_limits_not_stricter(
        &self,
        pool_devices: &PoolDevices,
        new: &[NewDevice],
    ) -> Result<(), Error> {
        if self.shared.lock().volumes_open == 0 {
            return Ok(());
        }
        let now = pool_devices.medium.limits();
        for one in new {
            if let Some(problem) =
                stricter_limit(&now, pool_devices.geometry.request_pages, &one.member)
            {
                let text =
                    format!("{}: {problem}, while volumes of the pool are open", one.member.uri);
                let hint = "Close them, and grow the pool then.";
                return Err(Error::new(ErrorCategory::Usage, text).with_hint(hint));
            }
        }
        Ok(())
    }

    /// The label of a new device.
    fn device_label(
        &self,
        new: &NewDevice,
        number: u32,
        devices: &DeviceTable,
        first_uri: &str,
    ) -> DeviceLabel {
        let state = self.shared.lock();
        DeviceLabel {
            store: state.store.uuid(),
            name: state.store.name(),
            number,
            uuid: new.uuid,
            generation: state.store.open_generation(),
            begin: devices.first_block_of(number),
            first_uri: first_uri.to_owned(),
        }
    }

    /// Sends a channel to each new device to all clients.
    fn send_device_channels_to_clients(
        &self,
        pool_devices: &mut PoolDevices,
        devices: &DeviceTable,
    ) -> Result<(), Error> {
        let old = self.shared.lock().store.uncommitted_devices().spans_with_start().count();
        let (limits, geometry) = (pool_devices.medium.limits(), pool_devices.geometry);
        pool_devices.combine(devices);
        for (begin, run) in devices.spans_with_start().skip(old) {
            let medium = Arc::clone(&pool_devices.members[run.device as usize].opened.medium);
            let leg = PoolDeviceSpan { medium, begin, at: run.at };
            let more = || {
                let legs = vec![MissingDevice(limits.clone()).channel()?, leg.medium.channel()?];
                let spans = SpanMap::with_previous_and(&leg, geometry.block_size);
                let channel =
                    MultiLegChannel::new(legs, spans, limits_with_unbounded_size(&limits))?;
                let request_pages = pool_devices.geometry.request_pages;
                Ok(NewDeviceChannel { channel: Box::new(channel), request_pages })
            };
            self.shared
                .add_device_channel(more)
                .map_err(|problem: Error| self.grow_error(problem.to_string()))?;
        }
        Ok(())
    }

    fn grow_error(&self, problem: String) -> Error {
        Error::new(ErrorCategory::Environment, format!("{}: grow: {problem}", self.name))
    }
}

/// Writes a label durably. A pool that was on the device becomes invalid.
fn write_label(opener: &Opener<'_>, member: &PoolDevice, label: &DeviceLabel) -> Result<(), Error> {
    let PoolDevice { uri, opened, geometry, .. } = member;
    let refuse = |category, problem: String| Error::new(category, format!("{uri:#}: {problem}"));
    let bytes = label.encode().map_err(|error| refuse(error.category(), error.to_string()))?;
    let raw = BlockingPageIo::open(opener.regions, &opener.clock, &*opened.medium, geometry);
    let mut raw = raw.map_err(|problem| refuse(ErrorCategory::Environment, problem.to_string()))?;
    // The old superblocks are erased before the label replaces the first one.
    let mut write = || {
        for at in [1, geometry.pages - 2, geometry.pages - 1] {
            raw.write(at, &[0; 4096])?;
        }
        raw.write(0, &bytes)?;
        raw.flush()
    };
    write().map_err(|status| {
        let problem = format!("write its label: {status}, expected success");
        refuse(ErrorCategory::Remote, problem)
    })
}

impl PoolDevices {
    /// Re-reads the sizes of the devices. The last one comes first, because the pool continues on it.
    fn refresh_sizes(&mut self, devices: &mut DeviceTable) -> Result<(), Error> {
        let last = devices.spans.last().map_or(0, |span| span.device);
        let others = (0..).take(self.members.len()).filter(|number| *number != last);
        for number in [last].into_iter().chain(others.collect::<Vec<u32>>()) {
            let member = &mut self.members[number as usize];
            let found = member.opened.medium.refresh_size();
            let blocks = found.map_err(|problem| {
                Error::new(ErrorCategory::Environment, format!("{}: {problem}", member.uri))
            })?;
            member.geometry.pages = blocks / member.geometry.blocks_in_page;
            let (pages, needed) = (member.geometry.pages, devices.device_blocks_min(number));
            if pages < needed {
                let text = format!(
                    "{}: device {number} of the pool has {pages} blocks of 4 KiB, expected {needed} at \
                     least",
                    member.uri
                );
                return Err(Error::new(ErrorCategory::Usage, text));
            }
            devices.extend_device(number, pages);
        }
        Ok(())
    }
}

/// The first limit of a device that is stricter than the current ones.
fn stricter_limit(now: &Limits, request_pages: u32, member: &PoolDevice) -> Option<String> {
    let limits = member.opened.medium.limits();
    let weaker = now.durability.weaker(Durability::VolatileCache);
    let needs = super::READING.into_iter().chain([Operation::Write]);
    let lacks = needs.filter(|needs| now.operations.has(*needs));
    let lacks = lacks.into_iter().find(|needs| !limits.operations.has(*needs));
    let found = member.geometry.request_pages;
    if found < request_pages {
        let (found, expected) = (found * PAGE_BYTES, request_pages * PAGE_BYTES);
        return Some(format!("it takes {found} bytes at once, expected {expected} at least"));
    }
    if limits.segments_max < now.segments_max {
        let (found, expected) = (limits.segments_max, now.segments_max);
        return Some(format!("it takes {found} pieces of memory at once, expected {expected}"));
    }
    if limits.depth_max < now.depth_max && limits.depth_max < super::DEPTH_MAX {
        let (found, expected) = (limits.depth_max, now.depth_max.min(super::DEPTH_MAX));
        return Some(format!("it takes {found} requests at once, expected {expected} at least"));
    }
    if weaker.weaker(limits.durability) != weaker {
        let (found, expected) = (limits.durability.describe(), now.durability.describe());
        return Some(format!("{found}, expected that {expected}"));
    }
    lacks.map(|lacks| format!("it has no {}, expected one", lacks.name()))
}

/// Whether a URI leads to this device: a namespace by another address is known once it is open.
fn is_same_device(opener: &Opener<'_>, uri: &Uri, device: &DeviceIdentity) -> bool {
    let way = uri.clone().read_only();
    device.is_same_device(&DeviceIdentity::of_uri(&way))
        || opener
            .open(&way)
            .is_ok_and(|it| device.is_same_device(&DeviceIdentity::of_opened(&way, &it)))
}
