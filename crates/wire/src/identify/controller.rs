//! Identify Controller (Base 2.1 §5.1.13.2.1). What follows from it is in [`super::limits`].

use super::power::PowerState;
use crate::field_type::code;
use crate::layout::{Ascii, layout};
use crate::register::Version;

layout! {
    /// CNS 01h: Identify Controller (Base 2.1 §5.1.13.2.1, Figure 312).
    pub struct IdentifyController[4096] {
        /// PCI Vendor ID.
        vid @ 0: u16;
        /// PCI Subsystem Vendor ID.
        ssvid @ 2: u16;
        /// Serial Number.
        sn @ 4: Ascii<20>;
        /// Model Number.
        mn @ 24: Ascii<40>;
        /// Firmware Revision.
        fr @ 64: Ascii<8>;
        /// Recommended Arbitration Burst, as a power of two.
        rab @ 72: u8;
        /// IEEE OUI Identifier, least significant byte first.
        ieee @ 73: [u8; 3];
        /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
        cmic @ 76: u8 {
            /// The subsystem may have more than one port.
            multiple_ports @ 0: bool;
            /// The subsystem may have more than one controller.
            multiple_controllers @ 1: bool;
            /// The controller is a virtual function.
            virtual_function @ 2: bool;
            /// Asymmetric Namespace Access Reporting Support.
            anars @ 3: bool;
        };
        /// Maximum Data Transfer Size, 2^MDTS pages of CAP.MPSMIN; 0 for no limit.
        mdts @ 77: u8;
        /// Controller ID.
        cntlid @ 78: u16;
        /// Version.
        ver @ 80: Version;
        /// RTD3 Resume Latency, in microseconds.
        rtd3r @ 84: u32;
        /// RTD3 Entry Latency, in microseconds.
        rtd3e @ 88: u32;
        /// Optional Asynchronous Events Supported.
        oaes @ 92: u32 {
            /// Namespace Attribute Notices.
            namespace_attribute_notices @ 8: bool;
            /// Firmware Activation Notices.
            firmware_activation_notices @ 9: bool;
            /// Asymmetric Namespace Access Change Notices.
            ana_change_notices @ 11: bool;
            /// Predictable Latency Event Aggregate Log Change Notices.
            predictable_latency_notices @ 12: bool;
            /// LBA Status Information Notices.
            lba_status_notices @ 13: bool;
            /// Endurance Group Event Aggregate Log Page Change Notices.
            endurance_group_notices @ 14: bool;
            /// Normal NVM Subsystem Shutdown event.
            normal_shutdown_notices @ 15: bool;
            /// Temperature Threshold Hysteresis Recovery event.
            temperature_recovery_notices @ 16: bool;
            /// Reachability Groups Change Notices.
            reachability_notices @ 17: bool;
            /// Allocated Namespace Attribute Notices.
            allocated_namespace_notices @ 19: bool;
            /// Zone Descriptor Changed Notices.
            zone_descriptor_notices @ 27: bool;
            /// Discovery Log Page Change Notification.
            discovery_notices @ 31: bool;
        };
        /// Controller Attributes.
        ctratt @ 96: u32 {
            /// Host Identifier Support: 128 bits.
            host_identifier_128 @ 0: bool;
            /// Non-Operational Power State Permissive Mode.
            permissive_mode @ 1: bool;
            /// NVM Sets.
            nvm_sets @ 2: bool;
            /// Read Recovery Levels.
            read_recovery_levels @ 3: bool;
            /// Endurance Groups.
            endurance_groups @ 4: bool;
            /// Predictable Latency Mode.
            predictable_latency_mode @ 5: bool;
            /// Traffic Based Keep Alive Support.
            tbkas @ 6: bool;
            /// Namespace Granularity.
            namespace_granularity @ 7: bool;
            /// SQ Associations.
            sq_associations @ 8: bool;
            /// UUID List.
            uuid_list @ 9: bool;
            /// Multi-Domain Subsystem.
            multi_domain @ 10: bool;
            /// Fixed Capacity Management.
            fixed_capacity @ 11: bool;
            /// Variable Capacity Management.
            variable_capacity @ 12: bool;
            /// Delete Endurance Group.
            delete_endurance_group @ 13: bool;
            /// Delete NVM Set.
            delete_nvm_set @ 14: bool;
            /// Extended LBA Formats Supported.
            elbas @ 15: bool;
            /// MDTS and Size Limits Exclude Metadata.
            mem @ 16: bool;
            /// HMB Restrict Non-Operational Power State Access.
            hmbr @ 17: bool;
            /// Reservations and Host Identifier Interaction.
            rhii @ 18: bool;
            /// Flexible Data Placement Support.
            fdps @ 19: bool;
        };
        /// Read Recovery Levels Supported, one bit each.
        rrls @ 100: u16;
        /// Boot Partition Capabilities.
        bpcap @ 102: u8 {
            /// RPMB Boot Partition Write Protection Support.
            rpmbbpwps @ 0..=1: u8;
            /// Set Features Boot Partition Write Protection Support.
            sfbpwps @ 2: bool;
        };
        /// NVM Subsystem Shutdown Latency, in microseconds.
        nssl @ 104: u32;
        /// Power Loss Signaling Information.
        plsi @ 110: u8 {
            /// Emergency power fail is supported.
            plsepf @ 0: bool;
            /// Forced quiescence is supported.
            plsfq @ 1: bool;
        };
        /// Controller Type.
        cntrltype @ 111: ControllerType;
        /// FRU Globally Unique Identifier.
        fguid @ 112: [u8; 16];
        /// Command Retry Delay Time 1, in units of 100 ms.
        crdt1 @ 128: u16;
        /// Command Retry Delay Time 2, in units of 100 ms.
        crdt2 @ 130: u16;
        /// Command Retry Delay Time 3, in units of 100 ms.
        crdt3 @ 132: u16;
        /// Controller Reachability Capabilities.
        crcap @ 134: u8 {
            /// Reachability Reporting Supported.
            rrsup @ 0: bool;
            /// Reachability Group ID Changeable.
            rgidc @ 1: bool;
        };
        /// Controller Instance Uniquifier (Base 2.3).
        ciu @ 135: u8;
        /// Controller Instance Random Number (Base 2.3).
        cirn @ 136: u64;
        /// NVM Subsystem Report.
        nvmsr @ 253: u8 {
            /// Part of a storage device.
            nvmesd @ 0: bool;
            /// Part of an enclosure.
            nvmee @ 1: bool;
        };
        /// VPD Write Cycle Information.
        vwci @ 254: u8 {
            /// VPD Write Cycles Remaining.
            vwcr @ 0..=6: u8;
            /// VPD Write Cycle Remaining Valid.
            vwcrv @ 7: bool;
        };
        /// Management Endpoint Capabilities.
        mec @ 255: u8 {
            /// SMBus or I2C port.
            smbusme @ 0: bool;
            /// PCIe port.
            pcieme @ 1: bool;
        };
        /// Optional Admin Command Support.
        oacs @ 256: u16 {
            /// Security Send and Receive.
            security @ 0: bool;
            /// Format NVM.
            format @ 1: bool;
            /// Firmware Commit and Image Download.
            firmware @ 2: bool;
            /// Namespace Management and Attachment.
            namespace_management @ 3: bool;
            /// Device Self-test.
            self_test @ 4: bool;
            /// Directives.
            directives @ 5: bool;
            /// NVMe-MI Send and Receive.
            nvme_mi @ 6: bool;
            /// Virtualization Management.
            virtualization @ 7: bool;
            /// Doorbell Buffer Config.
            doorbell_buffer @ 8: bool;
            /// Get LBA Status.
            get_lba_status @ 9: bool;
            /// Command and Feature Lockdown.
            lockdown @ 10: bool;
            /// Host Managed Live Migration.
            live_migration @ 11: bool;
        };
        /// Abort Command Limit, 0's based.
        acl @ 258: u8;
        /// Asynchronous Event Request Limit, 0's based.
        aerl @ 259: u8;
        /// Firmware Updates.
        frmw @ 260: u8 {
            /// First Firmware Slot Read Only.
            ffsro @ 0: bool;
            /// Number Of Firmware Slots, 1 to 7.
            nofs @ 1..=3: u8;
            /// Firmware Activation Without Reset.
            fawr @ 4: bool;
            /// Support Multiple Update Detection.
            smud @ 5: bool;
        };
        /// Log Page Attributes.
        lpa @ 261: u8 {
            /// SMART Support: per namespace.
            smart_per_namespace @ 0: bool;
            /// Commands Supported and Effects Support.
            cses @ 1: bool;
            /// Log Page Extended Data Support: long lengths and offsets.
            lpeds @ 2: bool;
            /// Telemetry Support.
            telemetry @ 3: bool;
            /// Persistent Event Support.
            persistent_event @ 4: bool;
            /// Miscellaneous Log Page Support: 00h, 12h, 13h and scopes in 05h.
            mlps @ 5: bool;
            /// Data Area 4 Support for telemetry.
            da4s @ 6: bool;
        };
        /// Error Log Page Entries, 0's based.
        elpe @ 262: u8;
        /// Number of Power States Support, 0's based.
        npss @ 263: u8;
        /// Admin Vendor Specific Command Configuration.
        avscc @ 264: u8 {
            /// Vendor specific admin commands have the common format.
            admin_common_format @ 0: bool;
        };
        /// Autonomous Power State Transition Attributes.
        apsta @ 265: u8 {
            /// Autonomous power state transitions are supported.
            apsts @ 0: bool;
        };
        /// Warning Composite Temperature Threshold, in kelvins.
        wctemp @ 266: u16;
        /// Critical Composite Temperature Threshold, in kelvins.
        cctemp @ 268: u16;
        /// Maximum Time for Firmware Activation, in units of 100 ms.
        mtfa @ 270: u16;
        /// Host Memory Buffer Preferred Size, in units of 4 KiB.
        hmpre @ 272: u32;
        /// Host Memory Buffer Minimum Size, in units of 4 KiB.
        hmmin @ 276: u32;
        /// Total NVM Capacity, in bytes.
        tnvmcap @ 280: u128;
        /// Unallocated NVM Capacity, in bytes.
        unvmcap @ 296: u128;
        /// Replay Protected Memory Block Support.
        rpmbs @ 312: u32 {
            /// Number of RPMB Units.
            nrpmbu @ 0..=2: u8;
            /// Authentication Method.
            rpmb_authentication @ 3..=5: u8;
            /// Total Size, in units of 128 KiB, 0's based.
            rpmb_total_size @ 16..=23: u8;
            /// Access Size, in units of 512 bytes, 0's based.
            rpmb_access_size @ 24..=31: u8;
        };
        /// Extended Device Self-test Time, in minutes.
        edstt @ 316: u16;
        /// Device Self-test Options.
        dsto @ 318: u8 {
            /// Single Device Self-test Operation in the subsystem.
            sdso @ 0: bool;
            /// Host-Initiated Refresh Support.
            hirs @ 1: bool;
        };
        /// Firmware Update Granularity, in units of 4 KiB; FFh for none.
        fwug @ 319: u8;
        /// Keep Alive Support: granularity in units of 100 ms; 0 for none.
        kas @ 320: u16;
        /// Host Controlled Thermal Management Attributes.
        hctma @ 322: u16 {
            /// Host Controlled Thermal Management Support.
            hctms @ 0: bool;
        };
        /// Minimum Thermal Management Temperature, in kelvins.
        mntmt @ 324: u16;
        /// Maximum Thermal Management Temperature, in kelvins.
        mxtmt @ 326: u16;
        /// Sanitize Capabilities.
        sanicap @ 328: u32 {
            /// Crypto Erase Support.
            ces @ 0: bool;
            /// Block Erase Support.
            bes @ 1: bool;
            /// Overwrite Support.
            ows @ 2: bool;
            /// Verification Support.
            vers @ 3: bool;
            /// No-Deallocate Inhibited.
            ndi @ 29: bool;
            /// No-Deallocate Modifies Media After Sanitize.
            nodmmas @ 30..=31: u8;
        };
        /// Host Memory Buffer Minimum Descriptor Entry Size, in units of 4 KiB.
        hmminds @ 332: u32;
        /// Host Memory Maximum Descriptors Entries.
        hmmaxd @ 336: u16;
        /// NVM Set Identifier Maximum.
        nsetidmax @ 338: u16;
        /// Endurance Group Identifier Maximum.
        endgidmax @ 340: u16;
        /// ANA Transition Time, in seconds.
        anatt @ 342: u8;
        /// Asymmetric Namespace Access Capabilities.
        anacap @ 343: u8 {
            /// Reports ANA Optimized.
            ana_optimized @ 0: bool;
            /// Reports ANA Non-Optimized.
            ana_non_optimized @ 1: bool;
            /// Reports ANA Inaccessible.
            ana_inaccessible @ 2: bool;
            /// Reports ANA Persistent Loss.
            ana_persistent_loss @ 3: bool;
            /// Reports ANA Change.
            ana_change @ 4: bool;
            /// The ANA group of an attached namespace does not change.
            ana_group_fixed @ 6: bool;
            /// Namespace Management supports a nonzero ANA Group Identifier.
            ana_group_managed @ 7: bool;
        };
        /// ANA Group Identifier Maximum.
        anagrpmax @ 344: u32;
        /// Number of ANA Group Identifiers.
        nanagrpid @ 348: u32;
        /// Persistent Event Log Size, in units of 64 KiB.
        pels @ 352: u32;
        /// Domain Identifier.
        domainid @ 356: u16;
        /// Key Per I/O Capabilities.
        kpioc @ 358: u8 {
            /// Key Per I/O Supported.
            kpios @ 0: bool;
            /// Key Per I/O Scope: all namespaces.
            kpiosc @ 1: bool;
        };
        /// Maximum Processing Time for Firmware Activation Without Reset, in units of 100 ms.
        mptfawr @ 360: u16;
        /// Max Endurance Group Capacity, in bytes.
        megcap @ 368: u128;
        /// Temperature Threshold Hysteresis Attributes.
        tmpthha @ 384: u8 {
            /// Maximum hysteresis, in kelvins.
            tmpthmh @ 0..=2: u8;
        };
        /// Command Quiesce Time, in milliseconds.
        cqt @ 386: u16;
        /// Submission Queue Entry Size, as powers of two.
        sqes @ 512: u8 {
            /// Required.
            sqes_min @ 0..=3: u8;
            /// Maximum.
            sqes_max @ 4..=7: u8;
        };
        /// Completion Queue Entry Size, as powers of two.
        cqes @ 513: u8 {
            /// Required.
            cqes_min @ 0..=3: u8;
            /// Maximum.
            cqes_max @ 4..=7: u8;
        };
        /// Maximum Outstanding Commands.
        maxcmd @ 514: u16;
        /// Number of Namespaces: the highest identifier.
        nn @ 516: u32;
        /// Optional NVM Command Support.
        oncs @ 520: u16 {
            /// Compare.
            compare @ 0: bool;
            /// Write Uncorrectable.
            write_uncorrectable @ 1: bool;
            /// Dataset Management.
            dataset_management @ 2: bool;
            /// Write Zeroes.
            write_zeroes @ 3: bool;
            /// Save and Select fields of features.
            save_select @ 4: bool;
            /// Reservations.
            reservations @ 5: bool;
            /// Timestamp.
            timestamp @ 6: bool;
            /// Verify.
            verify @ 7: bool;
            /// Copy.
            copy @ 8: bool;
            /// Copy Single Atomicity.
            copy_single_atomicity @ 9: bool;
            /// All Fast Copy.
            all_fast_copy @ 10: bool;
            /// Maximum Write Zeroes with Deallocate: WZDSL limits it.
            maxwzd @ 11: bool;
            /// Namespace Zeroes Support.
            nszs @ 12: bool;
        };
        /// Fused Operation Support.
        fuses @ 522: u16 {
            /// Compare and Write.
            fused_compare_and_write @ 0: bool;
        };
        /// Format NVM Attributes.
        fna @ 524: u8 {
            /// A format applies to all namespaces.
            format_all @ 0: bool;
            /// A secure erase applies to all namespaces.
            erase_all @ 1: bool;
            /// Cryptographic erase is supported.
            cryptographic_erase @ 2: bool;
            /// All ones as namespace is not supported.
            format_no_broadcast @ 3: bool;
        };
        /// Volatile Write Cache.
        vwc @ 525: u8 {
            /// Volatile Write Cache Present.
            vwcp @ 0: bool;
            /// Flush Behavior for all namespaces: 2 unsupported, 3 supported.
            fb @ 1..=2: u8;
        };
        /// Atomic Write Unit Normal, in blocks, 0's based.
        awun @ 526: u16;
        /// Atomic Write Unit Power Fail, in blocks, 0's based.
        awupf @ 528: u16;
        /// I/O Command Set Vendor Specific Command Configuration.
        icsvscc @ 530: u8 {
            /// Vendor specific I/O commands have the common format.
            io_common_format @ 0: bool;
        };
        /// Namespace Write Protection Capabilities.
        nwpc @ 531: u8 {
            /// No write protect and write protect.
            nwpwpsc @ 0: bool;
            /// Write protect until power cycle.
            wpupcsc @ 1: bool;
            /// Permanent write protect.
            pwpsc @ 2: bool;
        };
        /// Atomic Compare and Write Unit, in blocks, 0's based.
        acwu @ 532: u16;
        /// Copy Descriptor Formats Supported, one bit each.
        cdfs @ 534: u16;
        /// SGL Support.
        sgls @ 536: u32 {
            /// SGLs: 0 no, 1 yes, 2 yes if dwords are aligned.
            sgl_support @ 0..=1: u8;
            /// Keyed SGL Data Block.
            sgl_keyed @ 2: bool;
            /// SGL Descriptor Threshold.
            sdt @ 8..=15: u8;
            /// SGL Bit Bucket.
            sgl_bit_bucket @ 16: bool;
            /// Metadata may be one contiguous buffer of any alignment.
            sgl_metadata_aligned @ 17: bool;
            /// An SGL may be longer than the data.
            sgl_oversized @ 18: bool;
            /// MPTR may point to an SGL.
            sgl_metadata_pointer @ 19: bool;
            /// Addresses may be offsets.
            sgl_offset @ 20: bool;
            /// Transport SGL Data Block.
            sgl_transport @ 21: bool;
        };
        /// Maximum Number of Allowed Namespaces.
        mnan @ 540: u32;
        /// Maximum Domain Namespace Attachments.
        maxdna @ 544: u128;
        /// Maximum I/O Controller Namespace Attachments.
        maxcna @ 560: u32;
        /// Optimal Aggregated Queue Depth.
        oaqd @ 564: u32;
        /// Recommended Host-Initiated Refresh Interval, in days.
        rhiri @ 568: u8;
        /// Host-Initiated Refresh Time, in minutes.
        hirt @ 569: u8;
        /// Controller Maximum Memory Range Tracking Descriptors.
        cmmrtd @ 570: u16;
        /// NVM Subsystem Maximum Memory Range Tracking Descriptors.
        nmmrtd @ 572: u16;
        /// Minimum Memory Range Tracking Granularity.
        minmrtg @ 574: u8;
        /// Maximum Memory Range Tracking Granularity.
        maxmrtg @ 575: u8;
        /// Tracking Attributes.
        trattr @ 576: u8 {
            /// Track Host Memory Changes Support.
            thmcs @ 0: bool;
            /// Track User Data Changes Support.
            tudcs @ 1: bool;
            /// Memory Range Tracking Length Limit.
            mrtll @ 2: bool;
        };
        /// Maximum Controller User Data Migration Queues.
        mcudmq @ 578: u16;
        /// Maximum NVM Subsystem User Data Migration Queues.
        mnsudmq @ 580: u16;
        /// Maximum CDQ Memory Ranges.
        mcmr @ 582: u16;
        /// NVM Subsystem Maximum CDQ Memory Ranges.
        nmcmr @ 584: u16;
        /// Maximum Controller Data Queue PRP Count.
        mcdqpc @ 586: u16;
        /// NVM Subsystem NVMe Qualified Name.
        subnqn @ 768: Ascii<256>;
        /// I/O Queue Command Capsule Supported Size, in units of 16 bytes.
        ioccsz @ 1792: u32;
        /// I/O Queue Response Capsule Supported Size, in units of 16 bytes.
        iorcsz @ 1796: u32;
        /// In Capsule Data Offset, in units of 16 bytes.
        icdoff @ 1800: u16;
        /// Fabrics Controller Attributes.
        fcatt @ 1802: u8 {
            /// The controller model is static.
            static_controller_model @ 0: bool;
        };
        /// Maximum SGL Data Block Descriptors; 0 for no limit.
        msdbd @ 1803: u8;
        /// Optional Fabrics Commands Support.
        ofcs @ 1804: u16 {
            /// Disconnect.
            disconnect @ 0: bool;
        };
        /// Discovery Controller Type.
        dctype @ 1806: u8;
        /// Cross-Controller Reset Limit: maximum in progress at once (Base 2.3).
        ccrl @ 1807: u8;
        /// Power State Descriptors.
        psd @ 2048: PowerState[32];
        /// Vendor Specific.
        vendor @ 3072: [u8; 1024];
    }
}

code! {
    /// CNTRLTYPE (Base 2.1 §5.1.13.2.1).
    pub enum ControllerType {
        /// Not reported.
        NotReported = 0,
        /// I/O controller.
        Io = 1,
        /// Discovery controller.
        Discovery = 2,
        /// Administrative controller.
        Administrative = 3,
    }
}
