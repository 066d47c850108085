"""Second derivatives of a loss: Hessian spectra with the symmetries divided out, and the shape of the loss around a point."""
