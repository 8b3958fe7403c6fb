//! Telemetry log pages: a snapshot of controller data, captured on request of the host (Base 2.1
//! §5.1.12.1.8, §8.1.25).

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::log::LogPage;
use tenmil_wire::log::firmware::{TelemetryController, TelemetryHost};

use crate::controller::Controller;

/// Telemetry data of one controller.
#[derive(Clone, Debug, Default)]
pub(in crate::controller) struct Telemetry {
    /// Host-initiated data: data area 1, whole blocks.
    data_area: Vec<u8>,
    /// Number of host-initiated captures, modulo 256.
    generation: u8,
}

/// Bytes of a block of a data area.
pub(super) const BLOCK_BYTES: usize = 512;

/// Maximum bytes of a capture.
const AREA_BYTES_MAX: usize = 64 * 1024;

impl Telemetry {
    /// Captures new data.
    pub(super) fn capture(&mut self, text: &str) {
        self.data_area = text.as_bytes().to_vec();
        self.data_area.resize(self.data_area.len().next_multiple_of(BLOCK_BYTES), 0);
        self.generation = self.generation.wrapping_add(1);
    }
}

impl Controller {
    /// Telemetry Host-Initiated page: a header, and a data area of text. New data is captured on request.
    ///
    /// A capture is only permitted at offset zero, so that all parts of a page belong to one capture.
    pub(super) fn telemetry_page(
        &mut self,
        now: Instant,
        create: bool,
        offset: u64,
    ) -> Result<Vec<u8>, Status> {
        if create {
            if offset != 0 {
                return Err(Status::INVALID_FIELD);
            }
            let text = self.telemetry_text(now);
            self.telemetry.capture(&text);
        }
        let last = u16::try_from(self.telemetry.data_area.len() / BLOCK_BYTES).unwrap_or(u16::MAX);
        let header = TelemetryHost::zeroed().with(|header| {
            header
                .lid(LogPage::TelemetryHost.code())
                .da1lb(last)
                .da2lb(last)
                .da3lb(last)
                .thdgn(self.telemetry.generation)
        });
        Ok([header.as_bytes(), self.telemetry.data_area.as_slice()].concat())
    }

    /// Telemetry Controller-Initiated page: a header without data, because the controller captures none.
    pub(super) fn controller_telemetry_page(&self) -> Vec<u8> {
        let lid = LogPage::TelemetryController.code();
        TelemetryController::zeroed().with(|header| header.lid(lid)).as_bytes().to_vec()
    }

    /// Content of the data area, one fact per line.
    fn telemetry_text(&self, now: Instant) -> String {
        let info = self.subsystem.constants();
        let traffic = &self.health.traffic;
        let mut text = format!(
            "subsystem {}\nserial {}\ncontroller {}\nhours {}\n",
            info.nqn,
            info.serial,
            self.config.cntlid,
            self.health.power_on_hours(now),
        );
        text += &format!(
            "reads {} commands {} bytes\nwrites {} commands {} bytes\nerrors {} media {}\n",
            traffic.read_commands,
            traffic.read_bytes,
            traffic.write_commands,
            traffic.written_bytes,
            self.errors.total_count(),
            self.health.media_errors,
        );
        for record in self.subsystem.lock_state().visible_namespaces(self.config.cntlid) {
            let (nsid, blocks, shift) = (record.nsid, record.block_count(), record.block_shift);
            text += &format!("namespace {nsid} blocks {blocks} of 2^{shift} bytes\n");
        }
        text.truncate(AREA_BYTES_MAX);
        text
    }
}
