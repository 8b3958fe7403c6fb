//! Controller capabilities from CAP, VS and CRTO, checked against the specification.

use tenmil_base::Span;
use tenmil_wire::register::{self, CommandSetSelected, Configuration, ReadyTimeouts, Version};

use super::BringupError;

/// Capabilities of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Maximum entries of an I/O queue (CAP.MQES, made one-based).
    pub depth_max: u32,
    /// Timeout for clearing CC.EN (CAP.TO).
    pub disable_timeout: Span,
    /// Timeout for setting CC.EN (CAP.TO, CRTO).
    pub ready_timeout: Span,
    /// CAP.DSTRD: doorbells are 2^(2 + this) bytes apart.
    pub doorbell_stride: u8,
    /// NSSR is supported (CAP.NSSRS).
    pub subsystem_reset: bool,
    /// A controller memory buffer is controlled by CMBMSC (CAP.CMBS). Without it, there may be one as
    /// defined before 1.4.
    pub buffer_control: bool,
    /// Value for CC.CSS (CAP.CSS).
    pub command_sets: CommandSetSelected,
    /// CC.CRIME is set: the controller may be ready before its media are (CAP.CRMS).
    pub ready_independent_of_media: bool,
    /// VS.
    pub version: Version,
}

/// Submission entries of 2^6 bytes, completion entries of 2^4 (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_SHIFT: u8 = 6;
const COMPLETION_ENTRY_SHIFT: u8 = 4;

impl Capabilities {
    /// Checks the register values. `crto` is given if CAP.CRMS requires it.
    pub fn from_registers(
        cap: register::Capabilities,
        vs: Version,
        crto: Option<ReadyTimeouts>,
    ) -> Result<Self, BringupError> {
        if vs.major() == 0 {
            return Err(invalid_value("VS", vs.0.into(), "a major version of at least 1"));
        }
        if cap.mqes() == 0 {
            return Err(invalid_value("CAP.MQES", 0, "at least 1, zero-based"));
        }
        let page_min = cap.mpsmin();
        if page_min > cap.mpsmax() {
            return Err(invalid_value("CAP.MPSMIN", page_min.into(), "at most CAP.MPSMAX"));
        }
        if page_min > 0 {
            let expected = "0: pages of 4096 bytes";
            let (field, found) = ("CAP.MPSMIN", page_min.into());
            return Err(BringupError::Unsupported { field, found, expected });
        }
        let ready_independent_of_media = cap.crims() && !cap.crwms();
        let by_cap = timeout_from_units(cap.to().into());
        let by_crto = crto.map_or(by_cap, |crto| {
            timeout_from_units(if ready_independent_of_media { crto.crimt() } else { crto.crwmt() })
        });
        Ok(Self {
            depth_max: u32::from(cap.mqes()) + 1,
            disable_timeout: by_cap,
            // The longer of the two timeouts: some controllers leave CRTO zero, some CAP.TO.
            ready_timeout: by_cap.max(by_crto),
            doorbell_stride: cap.dstrd(),
            subsystem_reset: cap.nssrs(),
            buffer_control: cap.cmbs(),
            command_sets: selected_command_set(cap)?,
            ready_independent_of_media,
            version: vs,
        })
    }

    /// Value of CC to enable the controller: pages of 4 KiB, round robin, no shutdown.
    pub fn enable_configuration(&self) -> Configuration {
        Configuration::zeroed().with(|cc| {
            cc.en(true)
                .css(self.command_sets)
                .iosqes(SUBMISSION_ENTRY_SHIFT)
                .iocqes(COMPLETION_ENTRY_SHIFT)
                .crime(self.ready_independent_of_media)
        })
    }
}

fn selected_command_set(cap: register::Capabilities) -> Result<CommandSetSelected, BringupError> {
    match (cap.css_io(), cap.css_nvm(), cap.css_none()) {
        (true, _, _) => Ok(CommandSetSelected::All),
        (_, true, _) => Ok(CommandSetSelected::Nvm),
        (_, _, true) => Ok(CommandSetSelected::AdminOnly),
        _ => Err(invalid_value("CAP.CSS", cap.0 >> 37 & 0xff, "bit 0, 6 or 7 set")),
    }
}

fn invalid_value(field: &'static str, found: u64, expected: &'static str) -> BringupError {
    BringupError::InvalidRegister { field, found, expected }
}

/// Converts timeout units. Zero is treated as one unit, half a second.
fn timeout_from_units(count: u16) -> Span {
    Span::from_ms(u64::from(register::TIMEOUT_UNIT_MS) * u64::from(count.max(1)))
}
