//! Identify Controller data, checked against the specification.

use tenmil_base::Span;
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::identify::limits::page_power_limit_bytes;
use tenmil_wire::identify::{IdentifyController, IdentifyControllerNvm};

use crate::data_pointer::SglSupport;
use crate::error::InvalidValue;

/// Identity and capabilities of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Serial number, without padding.
    pub serial: String,
    /// Model number, without padding.
    pub model: String,
    /// Firmware revision, without padding.
    pub firmware: String,
    /// Limits and capabilities derived from the page.
    pub limits: ControllerLimits,
    /// Complete Identify Controller structure.
    pub page: Box<IdentifyController>,
}

/// Limits and capabilities of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerLimits {
    /// Maximum data transfer in bytes (MDTS). `None` means no limit.
    pub transfer_bytes_max: Option<u64>,
    /// SGL support (SGLS).
    pub sgl: SglSupport,
    /// I/O commands supported beside Flush, Read and Write (ONCS, FUSES).
    pub commands: OptionalIoCommands,
    /// A volatile write cache is present, so flushes are needed (VWC).
    pub volatile_write_cache: bool,
    /// Largest atomic write in blocks with respect to power loss (AWUPF).
    pub atomic_write_blocks: u32,
    /// Largest fused Compare and Write in blocks (ACWU).
    pub compare_and_write_blocks: u32,
    /// Maximum Verify in bytes (VSL). `None` means no limit.
    pub verify_bytes_max: Option<u64>,
    /// Maximum Write Zeroes in bytes (WZSL). `None` means no limit.
    pub write_zeroes_bytes_max: Option<u64>,
    /// Maximum Write Uncorrectable in bytes (WUSL). `None` means no limit.
    pub write_uncorrectable_bytes_max: Option<u64>,
    /// Maximum ranges of a Dataset Management command (DMRL), 1 to 256.
    pub deallocate_ranges_max: u16,
    /// Maximum blocks of one of its ranges (DMRSL). `None` means no limit.
    pub deallocate_range_blocks_max: Option<u32>,
    /// Maximum blocks of all its ranges (DMSL). `None` means no limit.
    pub deallocate_blocks_max: Option<u64>,
    /// Maximum outstanding Aborts (ACL).
    pub aborts: u16,
    /// Maximum outstanding Asynchronous Event Requests (AERL).
    pub event_requests: u16,
    /// Granularity of the keep-alive timeout (KAS). Zero if not supported.
    pub keep_alive_unit: Span,
    /// Shutdown latency (RTD3E). Zero if not reported.
    pub shutdown: Span,
    /// Granularity of offset and length of firmware image parts (FWUG).
    pub firmware_unit_bytes: u32,
}

/// Optional I/O commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptionalIoCommands {
    /// Compare.
    pub compare: bool,
    /// Compare and Write, fused.
    pub compare_and_write: bool,
    /// Write Uncorrectable.
    pub write_uncorrectable: bool,
    /// Dataset Management.
    pub dataset_management: bool,
    /// Write Zeroes.
    pub write_zeroes: bool,
    /// Reservations.
    pub reservations: bool,
    /// Verify.
    pub verify: bool,
    /// Copy.
    pub copy: bool,
}

/// Entry sizes set in CC (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;
/// Maximum ranges of a Dataset Management command (NVM 1.1 §3.3.3).
const RANGES_MAX: u16 = 256;
/// Unit of KAS (Base 2.1 §5.1.13.2.1).
const KEEP_ALIVE_UNIT_MS: u64 = 100;
/// FWUG: not reported; [`FIRMWARE_UNIT_ANY`] means no restriction (Base 2.1 §5.1.13.2.1).
const FIRMWARE_UNIT_UNKNOWN: u8 = 0;
const FIRMWARE_UNIT_ANY: u8 = 0xff;

impl Identity {
    /// Checks the Identify Controller data. `is_discovery` is set for a controller without I/O queues.
    pub fn from_identify(
        page: IdentifyController,
        is_discovery: bool,
    ) -> Result<Self, InvalidValue> {
        let entry = |field, found: u8, min, max, shift| match (min..=max).contains(&shift) {
            true => Ok(()),
            false => Err(InvalidValue {
                field,
                found: found.into(),
                expected: "a range that holds ours",
            }),
        };
        // The entry sizes of I/O queues are meaningless without I/O queues.
        if !is_discovery && page.cntrltype() != ControllerType::Discovery {
            let (min, max) = (page.sqes_min(), page.sqes_max());
            entry("identify controller: SQES", page.sqes(), min, max, SUBMISSION_ENTRY_SHIFT)?;
            let (min, max) = (page.cqes_min(), page.cqes_max());
            entry("identify controller: CQES", page.cqes(), min, max, COMPLETION_ENTRY_SHIFT)?;
        }
        if page.sgl_support() == 3 {
            let expected = "0 to 2 in bits 1:0";
            return Err(InvalidValue { field: "identify controller: SGLS", found: 3, expected });
        }
        Ok(Self {
            serial: page.sn().to_string(),
            model: page.mn().to_string(),
            firmware: page.fr().to_string(),
            limits: limits_of(&page),
            page: Box::new(page),
        })
    }

    /// Adds the limits of the NVM command set page (NVM 1.1 §4.1.5.4).
    pub fn add_nvm_limits(&mut self, page: &IdentifyControllerNvm) {
        let limits = &mut self.limits;
        limits.verify_bytes_max = page_power_limit_bytes(page.vsl(), 0);
        limits.write_zeroes_bytes_max = page_power_limit_bytes(page.wzsl(), 0);
        limits.write_uncorrectable_bytes_max = page_power_limit_bytes(page.wusl(), 0);
        if page.dmrl() != 0 {
            limits.deallocate_ranges_max = page.dmrl().into();
        }
        limits.deallocate_range_blocks_max = Some(page.dmrsl()).filter(|blocks| *blocks != 0);
        limits.deallocate_blocks_max = Some(page.dmsl()).filter(|blocks| *blocks != 0);
    }

    /// Whether `other` is the same controller.
    pub fn is_same_controller(&self, other: &Self) -> bool {
        (&self.serial, &self.model) == (&other.serial, &other.model)
    }
}

fn limits_of(page: &IdentifyController) -> ControllerLimits {
    let transfer_bytes_max = page.transfer_bytes_max(0);
    ControllerLimits {
        transfer_bytes_max,
        sgl: match page.sgl_support() {
            0 => SglSupport::None,
            2 => SglSupport::DwordAligned,
            _ => SglSupport::Any,
        },
        commands: OptionalIoCommands {
            compare: page.compare(),
            compare_and_write: page.fused_compare_and_write(),
            write_uncorrectable: page.write_uncorrectable(),
            dataset_management: page.dataset_management(),
            write_zeroes: page.write_zeroes(),
            reservations: page.reservations(),
            verify: page.verify(),
            copy: page.copy(),
        },
        volatile_write_cache: page.vwcp(),
        atomic_write_blocks: u32::from(page.awupf()) + 1,
        compare_and_write_blocks: u32::from(page.acwu()) + 1,
        // Without that page, these commands obey MDTS (NVM 1.1 §3.3).
        verify_bytes_max: transfer_bytes_max,
        write_zeroes_bytes_max: transfer_bytes_max,
        write_uncorrectable_bytes_max: transfer_bytes_max,
        deallocate_ranges_max: RANGES_MAX,
        deallocate_range_blocks_max: None,
        deallocate_blocks_max: None,
        aborts: u16::from(page.acl()) + 1,
        event_requests: u16::from(page.aerl()) + 1,
        keep_alive_unit: Span::from_ms(KEEP_ALIVE_UNIT_MS * u64::from(page.kas())),
        shutdown: Span::from_us(page.rtd3e().into()),
        firmware_unit_bytes: match page.fwug() {
            FIRMWARE_UNIT_UNKNOWN => 4096,
            FIRMWARE_UNIT_ANY => 4,
            units => u32::from(units) * 4096,
        },
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_wire::identify::controller::ControllerType;
    use tenmil_wire::identify::{IdentifyController, IdentifyControllerNvm};

    use super::Identity;
    use crate::data_pointer::SglSupport;

    fn plain_identify_controller() -> IdentifyController {
        IdentifyController::zeroed().with(|id| id.sqes(0x66).cqes(0x44))
    }

    #[test]
    fn entries_of_another_size_are_refused_by_name() {
        let cases = [
            (
                plain_identify_controller().with(|id| id.sqes(0x55)),
                "identify controller: SQES",
                0x55,
            ),
            (
                plain_identify_controller().with(|id| id.sqes(0x77)),
                "identify controller: SQES",
                0x77,
            ),
            (
                plain_identify_controller().with(|id| id.cqes(0x33)),
                "identify controller: CQES",
                0x33,
            ),
            (
                plain_identify_controller().with(|id| id.sgl_support(3)),
                "identify controller: SGLS",
                3,
            ),
        ];
        for (page, field, found) in cases {
            let lie = Identity::from_identify(page, false).unwrap_err();
            assert_eq!((lie.field, lie.found), (field, found));
        }
        assert!(
            Identity::from_identify(
                plain_identify_controller().with(|id| id.sqes(0x86).cqes(0x54)),
                false
            )
            .is_ok()
        );
        let without = || plain_identify_controller().with(|id| id.sqes(0).cqes(0));
        let discovery = without().with(|id| id.cntrltype(ControllerType::Discovery));
        assert!(Identity::from_identify(discovery, false).is_ok(), "it has no I/O queues");
        assert!(Identity::from_identify(without(), false).is_err());
        assert!(
            Identity::from_identify(without(), true).is_ok(),
            "nor has an old one that does not say so"
        );
    }

    #[test]
    fn zeroes_based_and_scaled_fields_are_converted() {
        let page = plain_identify_controller().with(|id| {
            let id = id.mdts(5).acl(3).aerl(7).kas(10).rtd3e(2_000_000).awupf(7);
            id.sgl_support(2).fwug(2)
        });
        let limits = Identity::from_identify(page, false).unwrap().limits;
        assert_eq!(limits.transfer_bytes_max, Some(131_072));
        assert_eq!(limits.verify_bytes_max, Some(131_072), "MDTS counts for these, too");
        assert_eq!((limits.aborts, limits.event_requests), (4, 8));
        assert_eq!(
            (limits.keep_alive_unit, limits.shutdown),
            (Span::from_secs(1), Span::from_secs(2))
        );
        assert_eq!((limits.sgl, limits.atomic_write_blocks), (SglSupport::DwordAligned, 8));
        assert_eq!((limits.firmware_unit_bytes, limits.deallocate_ranges_max), (8192, 256));
        let silent = Identity::from_identify(plain_identify_controller(), false).unwrap().limits;
        assert_eq!((silent.transfer_bytes_max, silent.sgl), (None, SglSupport::None));
        assert_eq!((silent.keep_alive_unit, silent.firmware_unit_bytes), (Span::default(), 4096));
    }

    #[test]
    fn nvm_command_set_page_replaces_mdts_limits() {
        let mut identity =
            Identity::from_identify(plain_identify_controller().with(|id| id.mdts(5)), false)
                .unwrap();
        let page = IdentifyControllerNvm::zeroed().with(|id| id.wzsl(9).dmrl(16).dmrsl(1000));
        identity.add_nvm_limits(&page);
        let limits = identity.limits;
        assert_eq!((limits.verify_bytes_max, limits.write_zeroes_bytes_max), (None, Some(2 << 20)));
        assert_eq!(limits.deallocate_ranges_max, 16);
        assert_eq!(limits.deallocate_range_blocks_max, Some(1000));
        assert_eq!(limits.deallocate_blocks_max, None);
    }
}
