//! Resources of a subsystem: NVM sets, domains, virtualization resources (Base 2.1 §5.1.13.2).

use crate::layout::layout;

layout! {
    /// CNS 04h: NVM sets (Base 2.1 §5.1.13.2.4).
    pub struct NvmSetList[4096] {
        /// Number of Identifiers.
        count @ 0: u8;
        /// Entries, ascending by identifier.
        entry @ 128: NvmSet[31];
    }

    /// An NVM set (Base 2.1 §5.1.13.2.4).
    pub struct NvmSet[128] {
        /// NVM Set Identifier.
        nvmsetid @ 0: u16;
        /// Endurance Group Identifier.
        endgid @ 2: u16;
        /// Random 4 KiB Read Typical, in units of 100 ns.
        rr4kt @ 8: u32;
        /// Optimal Write Size, in bytes.
        ows @ 12: u32;
        /// Total NVM Set Capacity, in bytes.
        tnvmsetcap @ 16: u128;
        /// Unallocated NVM Set Capacity, in bytes.
        unvmsetcap @ 32: u128;
    }

    /// CNS 14h: resources that a primary controller can assign to secondary ones (Base 2.1
    /// §5.1.13.3.1).
    pub struct PrimaryCapabilities[4096] {
        /// Controller Identifier.
        cntlid @ 0: u16;
        /// Port Identifier.
        portid @ 2: u16;
        /// Controller Resource Types.
        crt @ 4: u8 {
            /// Queues.
            vqrs @ 0: bool;
            /// Interrupts.
            virs @ 1: bool;
        };
        /// VQ Resources Flexible Total.
        vqfrt @ 32: u32;
        /// VQ Resources Flexible Assigned.
        vqrfa @ 36: u32;
        /// VQ Resources Flexible Allocated to Primary.
        vqrfap @ 40: u16;
        /// VQ Resources Private Total.
        vqprt @ 42: u16;
        /// VQ Resources Flexible Secondary Maximum.
        vqfrsm @ 44: u16;
        /// VQ Flexible Resource Preferred Granularity.
        vqgran @ 46: u16;
        /// VI Resources Flexible Total.
        vifrt @ 64: u32;
        /// VI Resources Flexible Assigned.
        virfa @ 68: u32;
        /// VI Resources Flexible Allocated to Primary.
        virfap @ 72: u16;
        /// VI Resources Private Total.
        viprt @ 74: u16;
        /// VI Resources Flexible Secondary Maximum.
        vifrsm @ 76: u16;
        /// VI Flexible Resource Preferred Granularity.
        vigran @ 78: u16;
    }

    /// CNS 15h: secondary controllers (Base 2.1 §5.1.13.3.2).
    pub struct SecondaryControllerList[4096] {
        /// Number of Identifiers.
        count @ 0: u8;
        /// Entries, ascending by identifier.
        entry @ 32: SecondaryController[127];
    }

    /// A secondary controller (Base 2.1 §5.1.13.3.2).
    pub struct SecondaryController[32] {
        /// Secondary Controller Identifier.
        scid @ 0: u16;
        /// Primary Controller Identifier.
        pcid @ 2: u16;
        /// Secondary Controller State.
        scs @ 4: u8 {
            /// Online.
            online @ 0: bool;
        };
        /// Virtual Function Number.
        vfn @ 8: u16;
        /// Number of VQ Flexible Resources Assigned.
        nvq @ 10: u16;
        /// Number of VI Flexible Resources Assigned.
        nvi @ 12: u16;
    }

    /// CNS 16h: preferred granularity of namespace sizes (NVM 1.1 §4.1.5.8).
    pub struct NamespaceGranularityList[4096] {
        /// Namespace Granularity Attributes.
        attributes @ 0: u32 {
            /// Granularity Descriptor Mapping: descriptor N is for LBA format N.
            gdm @ 0: bool;
        };
        /// Number of Descriptors, 0's based.
        count @ 4: u8;
        /// Entries.
        entry @ 32: NamespaceGranularity[16];
    }

    /// The granularity of a namespace (NVM 1.1 §4.1.5.8).
    pub struct NamespaceGranularity[16] {
        /// Namespace Size Granularity, in bytes.
        nszegran @ 0: u64;
        /// Namespace Capacity Granularity, in bytes.
        ncapgran @ 8: u64;
    }

    /// CNS 17h: UUID list; commands refer to a UUID by its index, from 1 on (Base 2.1 §5.1.13.2.14).
    pub struct UuidList[4096] {
        /// Entries, terminated by UUID 0.
        entry @ 32: UuidEntry[127];
    }

    /// A UUID (Base 2.1 §5.1.13.2.14).
    pub struct UuidEntry[32] {
        /// UUID Lists Entry Header.
        header @ 0: u8 {
            /// Identifier Association: 1 for PCI vendor, 2 for PCI subsystem vendor.
            association @ 0..=1: u8;
        };
        /// The UUID, big-endian.
        uuid @ 16: [u8; 16];
    }

    /// CNS 18h: domains (Base 2.1 §5.1.13.2.15).
    pub struct DomainList[4096] {
        /// Number of Domain Entries.
        count @ 0: u8;
        /// Entries, ascending by identifier.
        entry @ 128: Domain[31];
    }

    /// A domain (Base 2.1 §5.1.13.2.15).
    pub struct Domain[128] {
        /// Domain Identifier.
        domainid @ 0: u16;
        /// Total Domain Capacity, in bytes.
        tdc @ 16: u128;
        /// Unallocated Domain Capacity, in bytes.
        udc @ 32: u128;
        /// Max Endurance Group Domain Capacity, in bytes.
        megdc @ 48: u128;
    }
}

#[cfg(test)]
mod tests {
    use super::{SecondaryControllerList, UuidList};

    #[test]
    fn resource_entries_follow_the_header_contiguously() {
        let mut bytes = [0; 4096];
        bytes[32 + 32..32 + 34].copy_from_slice(&[7, 0]);
        bytes[32 + 36] = 1;
        let list = SecondaryControllerList::from_bytes(&bytes);
        let second = list.entry(1).unwrap();
        assert_eq!((second.scid(), second.online()), (7, true));
        assert_eq!(list.entry(127), None);
        bytes[64 + 16] = 0xaa;
        assert_eq!(UuidList::from_bytes(&bytes).entry(1).unwrap().uuid()[0], 0xaa);
    }
}
