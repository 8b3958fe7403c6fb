//! Telemetry: a picture of the controller, taken when the host asks for one
//! (Base 2.1 §5.1.12.1.8, §8.1.25).

use base::Instant;
use wire::Status;
use wire::log::LogPage;
use wire::log::firmware::{TelemetryController, TelemetryHost};

use crate::controller::Controller;

/// The pictures of one controller.
#[derive(Clone, Debug, Default)]
pub(in crate::controller) struct Telemetry {
    /// The host's picture: data area 1, whole blocks.
    area: Vec<u8>,
    /// How many pictures the host has had taken, modulo 256.
    generation: u8,
}

/// Bytes of a block of a data area.
pub(super) const BLOCK_BYTES: usize = 512;

/// Bytes of the largest picture.
const AREA_BYTES_MAX: usize = 64 * 1024;

impl Telemetry {
    /// Takes a picture.
    pub(super) fn capture(&mut self, words: &str) {
        self.area = words.as_bytes().to_vec();
        self.area.resize(self.area.len().next_multiple_of(BLOCK_BYTES), 0);
        self.generation = self.generation.wrapping_add(1);
    }
}

impl Controller {
    /// The host's picture, taken anew if it wants that: a header, and a data area of text.
    ///
    /// A new picture is only taken where the page begins, so that the pieces of one picture fit.
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
            let words = self.words(now);
            self.telemetry.capture(&words);
        }
        let last = u16::try_from(self.telemetry.area.len() / BLOCK_BYTES).unwrap_or(u16::MAX);
        let header = TelemetryHost::zeroed().with(|header| {
            header
                .lid(LogPage::TelemetryHost.code())
                .da1lb(last)
                .da2lb(last)
                .da3lb(last)
                .thdgn(self.telemetry.generation)
        });
        Ok([header.as_bytes(), self.telemetry.area.as_slice()].concat())
    }

    /// The controller takes no pictures of its own accord, so this is a header that says so.
    pub(super) fn controller_telemetry_page(&self) -> Vec<u8> {
        let lid = LogPage::TelemetryController.code();
        TelemetryController::zeroed().with(|header| header.lid(lid)).as_bytes().to_vec()
    }

    /// What there is to say, one fact to a line.
    fn words(&self, now: Instant) -> String {
        let about = self.subsystem.about();
        let traffic = &self.health.traffic;
        let mut words = format!(
            "subsystem {}\nserial {}\ncontroller {}\nhours {}\n",
            about.nqn,
            about.serial,
            self.config.cntlid,
            self.health.hours(now),
        );
        words += &format!(
            "reads {} commands {} bytes\nwrites {} commands {} bytes\nerrors {} media {}\n",
            traffic.read_commands,
            traffic.read_bytes,
            traffic.write_commands,
            traffic.written_bytes,
            self.errors.count(),
            self.health.media_errors,
        );
        for record in self.subsystem.lock().all_visible(self.config.cntlid) {
            let (nsid, blocks, shift) = (record.nsid, record.block_count(), record.block_shift);
            words += &format!("namespace {nsid} blocks {blocks} of 2^{shift} bytes\n");
        }
        words.truncate(AREA_BYTES_MAX);
        words
    }
}
