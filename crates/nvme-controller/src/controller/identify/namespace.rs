//! Identify Namespace structure (NVM 1.1 §4.1.5.1) and the I/O Command Set Independent Identify Namespace
//! structure (Base 2.1 §5.1.13.2.8).

use tenmil_base::{Durability, Operation};
use tenmil_wire::Status;
use tenmil_wire::identify::{IdentifyNamespace, IdentifyNamespaceIndependent, LbaFormat, NSID_ALL};

use crate::controller::Controller;
use crate::controller::config::ReservationPersistenceMode;
use crate::controller::subsystem::{
    NamespaceEntry, SubsystemState, block_size_shift, formattable_block_sizes,
};
use crate::namespace::CopyLimits;

/// RESCAP with every reservation type, persistence, and the newer meaning of IEKEY (NVM 1.1 §4.1.5.1).
const EVERY_RESERVATION: u8 = 0xff;
/// PTPLS bit of RESCAP.
const PERSISTS: u8 = 1;

impl Controller {
    pub(super) fn append_identify_namespace(
        &self,
        nsid: u32,
        must_be_attached: bool,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        // NSID FFFFFFFFh: common properties of namespaces that a host creates (NVM 1.1 §4.1.5.1).
        if nsid == NSID_ALL && must_be_attached && self.supports_namespace_management() {
            let sizes = &self.subsystem.constants().pool_block_sizes;
            page.extend(put_lba_formats(IdentifyNamespace::zeroed(), sizes).as_bytes());
            return Ok(());
        }
        let state = self.subsystem.lock_state();
        if let Some(record) = self.identified_namespace(&state, nsid, must_be_attached)? {
            let is_read_only = self.is_read_only_to_host(&state, nsid);
            page.extend(self.namespace_structure(record, is_read_only).as_bytes());
        }
        Ok(())
    }

    /// Whether the host of this controller may only read a namespace.
    pub(super) fn is_read_only_to_host(&self, state: &SubsystemState, nsid: u32) -> bool {
        let entry = state.controllers.get(&self.config.cntlid);
        entry.is_some_and(|entry| entry.rights().read_only.contains(nsid))
    }

    fn namespace_structure(
        &self,
        record: &NamespaceEntry,
        is_read_only: bool,
    ) -> IdentifyNamespace {
        let limits = &record.limits;
        let sizes = formattable_block_sizes(limits);
        let blocks = record.block_count();
        let device_shift = record.block_shift.saturating_sub(block_size_shift(limits.block_size));
        let atomic = u16::try_from((limits.atomic_write_blocks >> device_shift).max(1) - 1);
        let atomic = atomic.unwrap_or(u16::MAX);
        let boundary = limits.optimal_boundary_blocks >> device_shift;
        let copy = CopyLimits::DEFAULT;
        let format = sizes.iter().position(|&size| block_size_shift(size) == record.block_shift);
        let mut page = put_lba_formats(IdentifyNamespace::zeroed(), &sizes);
        page.set()
            .nsze(blocks)
            .ncap(blocks)
            .nuse(blocks)
            .nsabp(true)
            .nawun(atomic)
            .nawupf(atomic)
            .fidxl(format.and_then(|index| u8::try_from(index).ok()).unwrap_or(0))
            .shrns(record.is_shared)
            .wzds(limits.operations.has(Operation::WriteZeroes))
            .noiob(u16::try_from(boundary).unwrap_or(0))
            .nvmcap(record.capacity_bytes().into())
            .mssrl(copy.range_blocks_max)
            .mcl(copy.blocks_max)
            .msrc(u8::try_from(copy.ranges_max - 1).unwrap_or(u8::MAX))
            .cwp(record.is_write_protected() || is_read_only)
            .nguid(record.identity.nguid)
            .eui64(record.identity.eui64);
        if self.subsystem.constants().reservations {
            page.set().rescap(reservation_capabilities(record));
        }
        if self.subsystem.constants().ana_groups > 0 {
            page.set().anagrpid(record.ana_group);
        }
        if let Some(instance) = record.cache.as_ref().and_then(|cache| cache.instance()) {
            instance.store_to_identify_namespace(&mut page);
        }
        page
    }

    pub(super) fn independent_structure(
        &self,
        record: &NamespaceEntry,
        is_read_only: bool,
    ) -> IdentifyNamespaceIndependent {
        let mut page = IdentifyNamespaceIndependent::zeroed();
        page.set()
            .vwcnp(record.limits.durability == Durability::Persistent)
            .shrns(record.is_shared)
            .cwp(record.is_write_protected() || is_read_only)
            .nrdy(!record.is_formatting);
        if self.subsystem.constants().reservations {
            page.set().rescap(reservation_capabilities(record));
        }
        if self.subsystem.constants().ana_groups > 0 {
            page.set().anagrpid(record.ana_group);
        }
        page
    }
}

fn reservation_capabilities(record: &NamespaceEntry) -> u8 {
    match record.persistence {
        ReservationPersistenceMode::None => EVERY_RESERVATION & !PERSISTS,
        ReservationPersistenceMode::Emulated | ReservationPersistenceMode::Durable(_) => {
            EVERY_RESERVATION
        }
    }
}

/// Sets the LBA formats for these block sizes, best first.
fn put_lba_formats(mut page: IdentifyNamespace, sizes: &[u32]) -> IdentifyNamespace {
    page.set().nlbaf(u8::try_from(sizes.len().saturating_sub(1)).unwrap_or(0));
    for (index, &size) in sizes.iter().enumerate() {
        page.set().lbaf(index, LbaFormat::new(block_size_shift(size), 0));
    }
    page
}
