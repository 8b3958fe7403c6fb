//! The same without the feature `tls`: there is no configuration, and so no channel.

use std::io;

use tenmil_base::Error;

use super::ControlCertificate;

/// There is none.
#[derive(Clone, Debug)]
pub(super) enum ServerConfig {}

/// There is none.
#[derive(Clone, Debug)]
pub(super) enum ClientConfig {}

/// There is none.
#[derive(Debug)]
pub(crate) enum TlsChannel {}

fn without_tls<T>() -> Result<T, Error> {
    let text = "control API over TLS: this program was built without the feature `tls`, expected one \
                that was built with `cargo build --features tls`";
    Err(Error::usage(text))
}

pub(super) fn server_config(
    _: &ControlCertificate,
    _: Option<&[u8]>,
) -> Result<ServerConfig, Error> {
    without_tls()
}

pub(super) fn client_config(
    _: &[u8],
    _: &str,
    _: Option<&ControlCertificate>,
) -> Result<ClientConfig, Error> {
    without_tls()
}

impl TlsChannel {
    pub(super) fn server(config: &ServerConfig) -> io::Result<Self> {
        match *config {}
    }

    pub(super) fn client(config: &ClientConfig) -> io::Result<Self> {
        match *config {}
    }

    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        match *self {}
    }

    pub(crate) fn begins_with_http(&self) -> bool {
        match *self {}
    }

    pub(crate) fn push_received(&mut self, _: &[u8]) {
        match *self {}
    }

    pub(crate) fn read(&mut self, _: &mut [u8]) -> io::Result<Option<usize>> {
        match *self {}
    }

    pub(crate) fn write(&mut self, _: &[u8]) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn close(&mut self) {
        match *self {}
    }

    pub(crate) fn unsent(&self) -> &[u8] {
        match *self {}
    }

    pub(crate) fn mark_sent(&mut self, _: usize) {
        match *self {}
    }
}
