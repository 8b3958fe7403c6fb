//! Controller registers: offsets and fields (Base 2.1 §3.1.4; PCIe 1.1 §3.1.2).
//!
//! Each register is a type of one word: `Capabilities::from(value)` reads, `.with(...)` writes, and
//! [`offset`] contains its position in the BAR. Over fabrics the same offsets are property offsets.

use crate::field_type::code;
use crate::layout::layout;

pub mod offset;

/// Value of NSSR that resets the NVM subsystem: "NVMe" (Base 2.1 §3.1.4.7).
pub const SUBSYSTEM_RESET: u32 = 0x4e56_4d65;
/// Value of NSSD that requests a normal shutdown of the NVM subsystem: "Nrml" (Base 2.1 §3.1.4.20).
pub const SUBSYSTEM_SHUTDOWN_NORMAL: u32 = 0x4e72_6d6c;
/// Value of NSSD that requests an abrupt shutdown of the NVM subsystem: "Abpt" (Base 2.1
/// §3.1.4.20).
pub const SUBSYSTEM_SHUTDOWN_ABRUPT: u32 = 0x4162_7074;

/// Value read from every register of a removed controller: PCIe completes an unanswered read with
/// all ones (PCI Express Base 6.0 §2.3.2).
pub const ALL_ONES: u32 = u32::MAX;

/// Unit of CAP.TO and of CRTO: 500 ms (Base 2.1 §3.1.4.1).
pub const TIMEOUT_UNIT_MS: u32 = 500;

/// Version 2.1.0 in VS (Base 2.1 §3.1.4.2).
pub const VERSION_2_1: Version = Version(0x0002_0100);

layout! {
    /// CAP: Controller Capabilities (Base 2.1 §3.1.4.1).
    pub struct Capabilities(u64) {
        /// Maximum Queue Entries Supported, 0's based.
        mqes @ 0..=15: u16;
        /// Contiguous Queues Required.
        cqr @ 16: bool;
        /// Arbitration: weighted round robin with urgent priority class is supported.
        ams_weighted @ 17: bool;
        /// Arbitration: a vendor specific mechanism is supported.
        ams_vendor @ 18: bool;
        /// Timeout: longest wait for CSTS.RDY, in units of 500 ms.
        to @ 24..=31: u8;
        /// Doorbell Stride: doorbells are 2^(2 + DSTRD) bytes apart.
        dstrd @ 32..=35: u8;
        /// NVM Subsystem Reset Supported.
        nssrs @ 36: bool;
        /// NVM Command Set Supported.
        css_nvm @ 37: bool;
        /// I/O Command Sets Supported: Identify lists them.
        css_io @ 43: bool;
        /// No I/O Command Set Supported: admin commands only.
        css_none @ 44: bool;
        /// Boot Partition Support.
        bps @ 45: bool;
        /// Controller Power Scope.
        cps @ 46..=47: PowerScope;
        /// Memory Page Size Minimum: 2^(12 + MPSMIN) bytes.
        mpsmin @ 48..=51: u8;
        /// Memory Page Size Maximum: 2^(12 + MPSMAX) bytes.
        mpsmax @ 52..=55: u8;
        /// Persistent Memory Region Supported.
        pmrs @ 56: bool;
        /// Controller Memory Buffer Supported.
        cmbs @ 57: bool;
        /// NVM Subsystem Shutdown Supported.
        nsss @ 58: bool;
        /// Controller Ready With Media Support.
        crwms @ 59: bool;
        /// Controller Ready Independent of Media Support.
        crims @ 60: bool;
        /// NVM Subsystem Shutdown Enhancements Supported.
        nsses @ 61: bool;
    }

    /// VS: Version (Base 2.1 §3.1.4.2).
    #[derive(PartialOrd, Ord)]
    pub struct Version(u32) {
        /// Tertiary Version.
        tertiary @ 0..=7: u8;
        /// Minor Version.
        minor @ 8..=15: u8;
        /// Major Version.
        major @ 16..=31: u16;
    }

    /// CC: Controller Configuration (Base 2.1 §3.1.4.5).
    pub struct Configuration(u32) {
        /// Enable.
        en @ 0: bool;
        /// I/O Command Set Selected.
        css @ 4..=6: CommandSetSelected;
        /// Memory Page Size: 2^(12 + MPS) bytes.
        mps @ 7..=10: u8;
        /// Arbitration Mechanism Selected.
        ams @ 11..=13: Arbitration;
        /// Shutdown Notification.
        shn @ 14..=15: ShutdownNotification;
        /// I/O Submission Queue Entry Size: 2^IOSQES bytes.
        iosqes @ 16..=19: u8;
        /// I/O Completion Queue Entry Size: 2^IOCQES bytes.
        iocqes @ 20..=23: u8;
        /// Controller Ready Independent of Media Enable.
        crime @ 24: bool;
    }

    /// CSTS: Controller Status (Base 2.1 §3.1.4.6).
    pub struct ControllerStatus(u32) {
        /// Ready.
        rdy @ 0: bool;
        /// Controller Fatal Status.
        cfs @ 1: bool;
        /// Shutdown Status.
        shst @ 2..=3: ShutdownStatus;
        /// NVM Subsystem Reset Occurred; written with 1 to clear.
        nssro @ 4: bool;
        /// Processing Paused.
        pp @ 5: bool;
        /// Shutdown Type: the shutdown is the NVM subsystem's.
        st @ 6: bool;
    }

    /// AQA: Admin Queue Attributes (Base 2.1 §3.1.4.8).
    pub struct AdminQueueAttributes(u32) {
        /// Admin Submission Queue Size, 0's based.
        asqs @ 0..=11: u16;
        /// Admin Completion Queue Size, 0's based.
        acqs @ 16..=27: u16;
    }

    /// ASQ and ACQ: Admin Queue Base Address (Base 2.1 §3.1.4.9, §3.1.4.10).
    pub struct AdminQueueBase(u64) {
        /// The address of the queue in units of 4 KiB.
        page @ 12..=63: u64;
    }

    /// CMBLOC: Controller Memory Buffer Location (Base 2.1 §3.1.4.11).
    pub struct MemoryBufferLocation(u32) {
        /// Base Indicator Register: which BAR.
        bir @ 0..=2: u8;
        /// CMB Queue Mixed Memory Support.
        cqmms @ 3: bool;
        /// CMB Queue Physically Discontiguous Support.
        cqpds @ 4: bool;
        /// CMB Data Pointer Mixed Locations Support.
        cdpmls @ 5: bool;
        /// CMB Data Pointer and Command Independent Locations Support.
        cdpcils @ 6: bool;
        /// CMB Data Metadata Mixed Memory Support.
        cdmmms @ 7: bool;
        /// CMB Queue Dword Alignment.
        cqda @ 8: bool;
        /// Offset, in units of CMBSZ.SZU.
        ofst @ 12..=31: u32;
    }

    /// CMBSZ: Controller Memory Buffer Size (Base 2.1 §3.1.4.12).
    pub struct MemoryBufferSize(u32) {
        /// Submission Queue Support.
        sqs @ 0: bool;
        /// Completion Queue Support.
        cqs @ 1: bool;
        /// PRP SGL List Support.
        lists @ 2: bool;
        /// Read Data Support.
        rds @ 3: bool;
        /// Write Data Support.
        wds @ 4: bool;
        /// Size Units: 4 KiB << (4 * SZU).
        szu @ 8..=11: u8;
        /// Size, in units of SZU.
        sz @ 12..=31: u32;
    }

    /// BPINFO: Boot Partition Information (Base 2.1 §3.1.4.13).
    pub struct BootPartitionInformation(u32) {
        /// Boot Partition Size, in units of 128 KiB.
        bpsz @ 0..=14: u16;
        /// Boot Read Status.
        brs @ 24..=25: BootReadStatus;
        /// Active Boot Partition ID.
        abpid @ 31: bool;
    }

    /// BPRSEL: Boot Partition Read Select (Base 2.1 §3.1.4.14).
    pub struct BootPartitionReadSelect(u32) {
        /// Boot Partition Read Size, in units of 4 KiB.
        bprsz @ 0..=9: u16;
        /// Boot Partition Read Offset, in units of 4 KiB.
        bprof @ 10..=29: u32;
        /// Boot Partition Identifier.
        bpid @ 31: bool;
    }

    /// BPMBL: Boot Partition Memory Buffer Location (Base 2.1 §3.1.4.15).
    pub struct BootPartitionMemoryBuffer(u64) {
        /// The address of the buffer in units of 4 KiB.
        page @ 12..=63: u64;
    }

    /// CMBMSC: Controller Memory Buffer Memory Space Control (Base 2.1 §3.1.4.16).
    pub struct MemoryBufferControl(u64) {
        /// Capabilities Registers Enabled.
        cre @ 0: bool;
        /// Controller Memory Space Enable.
        cmse @ 1: bool;
        /// Controller Base Address, in units of 4 KiB.
        cba @ 12..=63: u64;
    }

    /// CMBSTS: Controller Memory Buffer Status (Base 2.1 §3.1.4.17).
    pub struct MemoryBufferStatus(u32) {
        /// Controller Base Address Invalid.
        cbai @ 0: bool;
    }

    /// CMBEBS: Controller Memory Buffer Elasticity Buffer Size (Base 2.1 §3.1.4.18).
    pub struct MemoryBufferElasticity(u32) {
        /// Elasticity Buffer Size Units: 0 bytes, 1 KiB, 2 MiB, 3 GiB.
        szu @ 0..=3: u8;
        /// Read Bypass Behavior: reads may pass writes.
        rbb @ 4: bool;
        /// Elasticity Buffer Size Base, in units of SZU.
        wbz @ 8..=31: u32;
    }

    /// CMBSWTP: Controller Memory Buffer Sustained Write Throughput (Base 2.1 §3.1.4.19).
    pub struct MemoryBufferThroughput(u32) {
        /// Sustained Write Throughput Units: 0 bytes, 1 KiB, 2 MiB, 3 GiB per second.
        swtu @ 0..=3: u8;
        /// Sustained Write Throughput, in units of SWTU.
        swtv @ 8..=31: u32;
    }

    /// CRTO: Controller Ready Timeouts (Base 2.1 §3.1.4.21).
    pub struct ReadyTimeouts(u32) {
        /// Controller Ready With Media Timeout, in units of 500 ms.
        crwmt @ 0..=15: u16;
        /// Controller Ready Independent of Media Timeout, in units of 500 ms.
        crimt @ 16..=31: u16;
    }

    /// PMRCAP: Persistent Memory Region Capabilities (Base 2.1 §3.1.4.22).
    pub struct PersistentMemoryCapabilities(u32) {
        /// Read Data Support.
        rds @ 3: bool;
        /// Write Data Support.
        wds @ 4: bool;
        /// Base Indicator Register: which BAR.
        bir @ 5..=7: u8;
        /// Time Units: 0 is 500 ms, 1 is minutes.
        pmrtu @ 8..=9: u8;
        /// Write Barrier Mechanisms: a read of the region is one.
        barrier_memory_read @ 10: bool;
        /// Write Barrier Mechanisms: a read of PMRSTS is one.
        barrier_status_read @ 11: bool;
        /// Timeout, in units of PMRTU.
        pmrto @ 16..=23: u8;
        /// Controller Memory Space Supported.
        cmss @ 24: bool;
    }

    /// PMRCTL: Persistent Memory Region Control (Base 2.1 §3.1.4.23).
    pub struct PersistentMemoryControl(u32) {
        /// Enable.
        en @ 0: bool;
    }

    /// PMRSTS: Persistent Memory Region Status (Base 2.1 §3.1.4.24).
    pub struct PersistentMemoryStatus(u32) {
        /// Error.
        err @ 0..=7: u8;
        /// Not Ready.
        nrdy @ 8: bool;
        /// Health Status.
        hsts @ 9..=11: PersistentMemoryHealth;
        /// Controller Base Address Invalid.
        cbai @ 12: bool;
    }

    /// PMREBS: Persistent Memory Region Elasticity Buffer Size (Base 2.1 §3.1.4.25).
    pub struct PersistentMemoryElasticity(u32) {
        /// Elasticity Buffer Size Units: 0 bytes, 1 KiB, 2 MiB, 3 GiB.
        szu @ 0..=3: u8;
        /// Read Bypass Behavior: reads may pass writes.
        rbb @ 4: bool;
        /// Elasticity Buffer Size Base, in units of SZU.
        wbz @ 8..=31: u32;
    }

    /// PMRSWTP: Persistent Memory Region Sustained Write Throughput (Base 2.1 §3.1.4.26).
    pub struct PersistentMemoryThroughput(u32) {
        /// Sustained Write Throughput Units: 0 bytes, 1 KiB, 2 MiB, 3 GiB per second.
        swtu @ 0..=3: u8;
        /// Sustained Write Throughput, in units of SWTU.
        swtv @ 8..=31: u32;
    }

    /// PMRMSCL: Persistent Memory Region Memory Space Control Lower (Base 2.1 §3.1.4.27).
    pub struct PersistentMemorySpaceLower(u32) {
        /// Controller Memory Space Enable.
        cmse @ 1: bool;
        /// Controller Base Address, bits 31 to 12.
        cba @ 12..=31: u32;
    }

    /// PMRMSCU: Persistent Memory Region Memory Space Control Upper (Base 2.1 §3.1.4.28).
    pub struct PersistentMemorySpaceUpper(u32) {
        /// Controller Base Address, bits 63 to 32.
        cba @ 0..=31: u32;
    }
}

code! {
    /// CAP.CPS: scope of the controller's power (Base 2.1 §3.1.4.1).
    pub enum PowerScope {
        /// Not reported.
        NotReported = 0,
        /// Controller scope.
        Controller = 1,
        /// Domain scope.
        Domain = 2,
        /// NVM subsystem scope.
        Subsystem = 3,
    }

    /// CC.CSS: enabled I/O command sets (Base 2.1 §3.1.4.5).
    pub enum CommandSetSelected {
        /// NVM Command Set.
        Nvm = 0,
        /// All supported I/O command sets.
        All = 6,
        /// Admin command set only.
        AdminOnly = 7,
    }

    /// CC.AMS: arbitration mechanism of submission queues (Base 2.1 §3.1.4.5).
    pub enum Arbitration {
        /// Round robin.
        RoundRobin = 0,
        /// Weighted round robin with urgent priority class.
        WeightedRoundRobin = 1,
        /// Vendor specific.
        Vendor = 7,
    }

    /// CC.SHN: shutdown notification (Base 2.1 §3.1.4.5).
    pub enum ShutdownNotification {
        /// No notification.
        None = 0,
        /// Normal shutdown.
        Normal = 1,
        /// Abrupt shutdown.
        Abrupt = 2,
    }

    /// CSTS.SHST: shutdown status (Base 2.1 §3.1.4.6).
    pub enum ShutdownStatus {
        /// Normal operation.
        None = 0,
        /// Shutdown processing is occurring.
        Occurring = 1,
        /// Shutdown processing is complete.
        Complete = 2,
    }

    /// BPINFO.BRS: boot read status (Base 2.1 §3.1.4.13).
    pub enum BootReadStatus {
        /// No boot partition read was requested.
        None = 0,
        /// Boot partition read in progress.
        InProgress = 1,
        /// Boot partition read completed.
        Complete = 2,
        /// Error during boot partition read.
        Error = 3,
    }

    /// PMRSTS.HSTS: health status of the persistent memory region (Base 2.1 §3.1.4.24).
    pub enum PersistentMemoryHealth {
        /// Normal operation.
        Normal = 0,
        /// Restore error.
        RestoreError = 1,
        /// Read only.
        ReadOnly = 2,
        /// Unreliable.
        Unreliable = 3,
    }
}

impl Capabilities {
    /// Maximum queue entries: 1 to 65 536.
    #[must_use]
    pub fn entries_max(&self) -> u32 {
        u32::from(self.mqes()) + 1
    }

    /// Distance between doorbells in bytes.
    #[must_use]
    pub fn doorbell_stride_bytes(&self) -> usize {
        4 << self.dstrd()
    }

    /// Smallest memory page size that the host may select.
    #[must_use]
    pub fn page_bytes_min(&self) -> usize {
        4096 << self.mpsmin()
    }

    /// Largest memory page size that the host may select.
    #[must_use]
    pub fn page_bytes_max(&self) -> usize {
        4096 << self.mpsmax()
    }

    /// Worst-case time until the controller is ready, or not ready.
    #[must_use]
    pub fn ready_timeout_ms(&self) -> u32 {
        u32::from(self.to()) * TIMEOUT_UNIT_MS
    }
}

impl Configuration {
    /// Memory page size selected by the host.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        4096 << self.mps()
    }
}

impl MemoryBufferSize {
    /// Unit of SZ and of CMBLOC.OFST. `None` if it exceeds 64 bits.
    #[must_use]
    pub fn unit_bytes(&self) -> Option<u64> {
        4096_u64.checked_mul(1 << (4 * u32::from(self.szu())))
    }

    /// Length of the controller memory buffer. `None` if it exceeds 64 bits.
    #[must_use]
    pub fn len_bytes(&self) -> Option<u64> {
        self.unit_bytes()?.checked_mul(u64::from(self.sz()))
    }
}

impl core::fmt::Display for Version {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(out, "{}.{}.{}", self.major(), self.minor(), self.tertiary())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Capabilities, CommandSetSelected, Configuration, MemoryBufferSize, ShutdownNotification,
        VERSION_2_1, Version,
    };

    #[test]
    fn cc_and_aqa_of_bring_up_have_the_expected_bits() {
        let configuration = Configuration::zeroed()
            .with(|cc| cc.en(true).css(CommandSetSelected::All).iosqes(6).iocqes(4));
        assert_eq!(configuration.0, 0x0046_0061);
        assert_eq!(configuration.page_bytes(), 4096);
        let down = configuration.with(|cc| cc.shn(ShutdownNotification::Normal));
        assert_eq!(down.0, 0x0046_4061);
    }

    #[test]
    fn cap_register_of_qemu_is_decoded() {
        let cap = Capabilities(0x0040_0020_0f01_07ff);
        assert_eq!((cap.mqes(), cap.entries_max(), cap.cqr()), (0x7ff, 2048, true));
        assert_eq!((cap.to(), cap.ready_timeout_ms()), (15, 7500));
        assert!(cap.css_nvm() && !cap.css_io());
        assert_eq!((cap.page_bytes_min(), cap.page_bytes_max()), (4096, 65536));
        assert_eq!(cap.doorbell_stride_bytes(), 4);
    }

    #[test]
    fn versions_are_ordered_and_printed() {
        assert_eq!(VERSION_2_1.to_string(), "2.1.0");
        assert!(Version(0x0001_0400) < VERSION_2_1);
        assert_eq!(Version::zeroed().with(|vs| vs.major(2).minor(1)), VERSION_2_1);
    }

    #[test]
    fn cmb_size_unit_is_a_power_of_sixteen() {
        let size = MemoryBufferSize::zeroed().with(|size| size.szu(2).sz(3));
        assert_eq!((size.unit_bytes(), size.len_bytes()), (Some(1 << 20), Some(3 << 20)));
        let absurd = MemoryBufferSize::zeroed().with(|size| size.szu(15).sz(1));
        assert_eq!(absurd.len_bytes(), None);
    }
}
