//! Builds the view of a namespace and its controller for the queues of a block device.

use tenmil_base::{Durability, Operation, OperationSet};
use tenmil_wire::identify::namespace::GuardFormat;

use super::{Namespace, Protection};
use crate::controller::ControllerLimits;
use crate::namespace_queue::{BlocksMax, Metadata, NamespaceView, ProtectionChecks};

/// Page size; CC.MPS is always set to it (Base 2.1 §3.1.4.5).
const PAGE_BYTES: u32 = 4096;

impl Namespace {
    /// View for a [`NamespaceQueue`](crate::NamespaceQueue) of this namespace. Where possible, the
    /// controller handles protection information itself: it inserts, checks and strips it.
    pub fn view(&self, limits: &ControllerLimits) -> NamespaceView {
        let atomic = if self.atomic_write_blocks == 0 {
            limits.atomic_write_blocks
        } else {
            self.atomic_write_blocks
        };
        NamespaceView {
            nsid: self.id,
            block_size: self.block_size,
            block_count: self.block_count,
            metadata: self.metadata_location(),
            protection: self.protection.map_or_else(ProtectionChecks::default, protection_checks),
            transfer_bytes_max: at_most_u32(limits.transfer_bytes_max),
            optimal_boundary_blocks: self.optimal_boundary_blocks,
            atomic_write_blocks: atomic,
            durability: match limits.volatile_write_cache {
                true => Durability::VolatileCache,
                false => Durability::Persistent,
            },
            support: supported_operations(limits),
            sgl: limits.sgl,
            page_bytes: PAGE_BYTES,
            blocks_max: self.blocks_max(limits),
        }
    }

    fn metadata_location(&self) -> Metadata {
        let hidden = self.protection.map_or(0, |protection| protection.information_len_bytes());
        match (self.metadata_size, self.metadata_extended) {
            (0, _) => Metadata::None,
            (size, _) if size == hidden => Metadata::None,
            (size, true) => Metadata::Interleaved(size),
            (size, false) => Metadata::Separate(size),
        }
    }

    fn blocks_max(&self, limits: &ControllerLimits) -> BlocksMax {
        // A limit below one block still is a limit; zero would mean none.
        let blocks = |bytes: Option<u64>| {
            at_most_u32(bytes.map(|bytes| (bytes / u64::from(self.block_size)).max(1)))
        };
        let compare_and_write = match self.compare_and_write_blocks {
            0 => limits.compare_and_write_blocks,
            own => own,
        };
        BlocksMax {
            write_zeroes: blocks(limits.write_zeroes_bytes_max),
            verify: blocks(limits.verify_bytes_max),
            write_uncorrectable: blocks(limits.write_uncorrectable_bytes_max),
            deallocate: limits.deallocate_range_blocks_max.unwrap_or(0),
            copy: self.copy_blocks_max(),
            compare_and_write: if limits.commands.compare_and_write {
                compare_and_write
            } else {
                0
            },
        }
    }

    /// Copy limit: one range is sent at a time, so both limits apply to it.
    fn copy_blocks_max(&self) -> u32 {
        let both = [self.copy.range_blocks_max, self.copy.blocks_max];
        both.into_iter().filter(|blocks| *blocks != 0).min().unwrap_or(0)
    }
}

impl Protection {
    /// Bytes of protection information in a block's metadata (NVM 1.1 §5.3.1).
    pub const fn information_len_bytes(self) -> u16 {
        match self.guard {
            GuardFormat::Bits16 => super::PROTECTION_BYTES_SHORT,
            _ => super::PROTECTION_BYTES_LONG,
        }
    }
}

fn protection_checks(protection: Protection) -> ProtectionChecks {
    // With type 3, the reference tag belongs to the application; wide guards have wider tags.
    let has_reference = protection.kind != 3 && protection.guard == GuardFormat::Bits16;
    ProtectionChecks {
        action: true,
        check_guard: true,
        check_application: false,
        check_reference: has_reference,
        reference_is_lba: has_reference,
    }
}

fn supported_operations(limits: &ControllerLimits) -> OperationSet {
    let commands = limits.commands;
    let optional = [
        (commands.dataset_management, Operation::Deallocate),
        (commands.write_zeroes, Operation::WriteZeroes),
        (commands.compare, Operation::Compare),
        (commands.write_uncorrectable, Operation::WriteUncorrectable),
        (commands.verify, Operation::Verify),
        (commands.copy, Operation::Copy),
    ];
    let mut operations = vec![Operation::Read, Operation::Write, Operation::Flush];
    operations.extend(optional.iter().filter(|(has, _)| *has).map(|(_, operation)| *operation));
    OperationSet::from_operations(&operations)
}

/// Converts a limit to a number, where zero means none.
fn at_most_u32(limit: Option<u64>) -> u32 {
    limit.map_or(0, |limit| u32::try_from(limit).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Durability, Operation};
    use tenmil_wire::identify::namespace::{ExtendedLbaFormat, GuardFormat, LbaFormat};
    use tenmil_wire::identify::{IdentifyController, IdentifyNamespace, IdentifyNamespaceNvm};

    use crate::{ControllerLimits, Identity, Metadata, Namespace, NamespaceView};

    fn controller_limits(
        change: impl Fn(IdentifyController) -> IdentifyController,
    ) -> ControllerLimits {
        let page = IdentifyController::zeroed().with(|id| id.sqes(0x66).cqes(0x44));
        Identity::from_identify(change(page), false).unwrap().limits
    }

    fn view(
        controller: &ControllerLimits,
        change: impl Fn(IdentifyNamespace) -> IdentifyNamespace,
    ) -> NamespaceView {
        let page = IdentifyNamespace::zeroed()
            .with(|id| id.nsze(1000).ncap(1000).lbaf(0, LbaFormat::new(12, 0)));
        Namespace::from_identify(3, &change(page), None, &[]).unwrap().view(controller)
    }

    #[test]
    fn operation_is_supported_exactly_if_its_bit_is_set() {
        let none = view(&controller_limits(|page| page), |page| page).support;
        let all = controller_limits(|page| page.with(|id| id.oncs(0x1ff)));
        let all = view(&all, |page| page).support;
        for operation in Operation::ALL {
            if operation == Operation::CompareAndWrite {
                assert!(!all.has(operation), "a pair of commands");
                continue;
            }
            let always = matches!(operation, Operation::Read | Operation::Write | Operation::Flush);
            assert_eq!((none.has(operation), all.has(operation)), (always, true), "{operation:?}");
        }
    }

    #[test]
    fn byte_limits_are_converted_to_blocks_and_no_limit_to_zero() {
        let free = view(&controller_limits(|page| page), |page| page);
        assert_eq!((free.transfer_bytes_max, free.blocks_max), (0, Default::default()));
        assert_eq!((free.nsid, free.block_size, free.block_count), (3, 4096, 1000));
        assert_eq!(free.durability, Durability::Persistent);
        let tight = controller_limits(|page| page.with(|id| id.mdts(5).vwcp(true).awupf(3)));
        let tight = view(&tight, |page| page.with(|id| id.mssrl(16).mcl(8)));
        assert_eq!(tight.transfer_bytes_max, 131_072);
        assert_eq!((tight.blocks_max.write_zeroes, tight.blocks_max.verify), (32, 32));
        assert_eq!((tight.blocks_max.copy, tight.blocks_max.compare_and_write), (8, 0));
        assert_eq!((tight.durability, tight.atomic_write_blocks), (Durability::VolatileCache, 4));
    }

    #[test]
    fn namespace_atomic_units_take_precedence_over_controller_units() {
        let controller = controller_limits(|page| page.with(|id| id.awupf(3).acwu(1).fuses(1)));
        let common = view(&controller, |page| page);
        assert_eq!((common.atomic_write_blocks, common.blocks_max.compare_and_write), (4, 2));
        let own = view(&controller, |page| page.with(|id| id.nsabp(true).nawupf(7).nacwu(3)));
        assert_eq!((own.atomic_write_blocks, own.blocks_max.compare_and_write), (8, 4));
    }

    #[test]
    fn metadata_is_visible_unless_it_is_only_protection_information() {
        let controller = controller_limits(|page| page);
        let with = |size, extended, kind| {
            let found = view(&controller, |page| {
                page.with(|id| {
                    let id = id.lbaf(0, LbaFormat::new(12, size));
                    id.metadata_extended(extended).pit(kind)
                })
            });
            (found.metadata, found.protection.action, found.protection.check_reference)
        };
        assert_eq!(with(0, false, 0), (Metadata::None, false, false));
        assert_eq!(with(8, false, 0), (Metadata::Separate(8), false, false));
        assert_eq!(with(8, true, 0), (Metadata::Interleaved(8), false, false));
        assert_eq!(with(8, true, 1), (Metadata::None, true, true));
        assert_eq!(with(16, false, 1), (Metadata::Separate(16), true, true));
        assert_eq!(with(8, true, 3), (Metadata::None, true, false));
    }

    #[test]
    fn a_wide_guard_hides_sixteen_bytes() {
        let page = IdentifyNamespace::zeroed()
            .with(|id| id.nsze(9).ncap(9).pit(1).lbaf(0, LbaFormat::new(12, 16)));
        let wide = ExtendedLbaFormat::zeroed().with(|format| format.pif(GuardFormat::Bits64));
        let nvm = IdentifyNamespaceNvm::zeroed().with(|id| id.elbaf(0, wide));
        let found = Namespace::from_identify(3, &page, Some(&nvm), &[]).unwrap();
        let view = found.view(&controller_limits(|page| page));
        assert_eq!((view.metadata, view.protection.check_reference), (Metadata::None, false));
    }
}
